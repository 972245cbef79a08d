"""The engine's config: the DeepSpeed keys this version implements, in one place, with no torch.

A key that is not here is refused with the nearest one that is: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayzero.engine.data.split import micro_steps, rank_samples
from rayzero.engine.errors import ConfigError
from rayzero.engine.validation import validated


def _whole(value: Any) -> Any:
    """Config files write counts as `5e8`: a float that is a whole number is that integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_bool(value: Any) -> Any:
    """True equals 1, and would pass for a number."""
    if isinstance(value, bool):
        raise ValueError("a number was expected")
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(Section):
    """`{"type": "AdamW", "params": {"lr": 1e-3, ...}}`; params go to the optimizer's class."""

    type: Literal["Adam", "AdamW", "SGD"]
    params: dict[str, Any] = Field(default_factory=dict)


class SchedulerConfig(Section):
    """`{"type": "WarmupLR", "params": {...}}`: a pure function of the step sets every lr."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    params: dict[str, Any] = Field(default_factory=dict)


class Bf16Config(Section):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = False


class ZeroConfig(Section):
    """What is sharded (the stage), and how much travels at once."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_bool)] = 0
    reduce_bucket_size: Count | None = Field(
        default=None,
        description="elements reduced together at stages 0 to 2; by default an eighth of the "
        "model, at least 250 thousand and at most 4 million",
    )
    overlap_comm: bool = Field(
        default=True, description="start a bucket's collective while backward goes on"
    )


class RayzeroConfig(Section):
    """Keys of our own, which DeepSpeed does not have."""

    unit_classes: tuple[str, ...] = Field(
        default=(),
        description="class names of the modules gathered as one unit at stage 3; "
        "empty: the elements of every ModuleList and Sequential",
    )
    slots: int = Field(
        default=2, ge=2, description="units of weights that may be live at once at stage 3"
    )


class EngineConfig(Section):
    """A whole config file."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    gradient_clipping: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, strict=True)
    steps_per_print: Count | None = Field(
        default=None, description="rank 0 logs loss and lr every this many steps"
    )
    rayzero: RayzeroConfig = RayzeroConfig()


@dataclass(frozen=True)
class BatchSizes:
    """The batch triangle, solved. All counts are samples but `micro_steps`.

    `shares` are each rank's share of a step's samples; empty for even shares.
    """

    global_batch: int
    micro_batch: int
    micro_steps: int
    shares: tuple[float, ...] = ()


def read_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The config as a dict, from a dict or from a JSON or Hjson file.

    Raises:
        ConfigError: the file is missing, or is not Hjson.
    """
    if isinstance(source, dict):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"engine config: a {type(source).__name__} was given",
            allowed="a dict, or the path of a JSON or Hjson file",
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"engine config {str(path)!r} cannot be read: {reason}",
            fix="`engine:` in the job file, or `config=`: the path of a DeepSpeed config file",
        ) from None
    try:
        value = hjson.loads(text, object_pairs_hook=_no_twice)
    except (hjson.HjsonDecodeError, ValueError) as error:
        raise ConfigError(f"engine config {str(path)!r} is not JSON or Hjson: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"engine config {str(path)!r}: a mapping of keys to values was expected")
    return value


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {twice[0]!r} stands there twice")
    return seen


def parse_config(source: str | Path | dict[str, Any] | EngineConfig | None) -> EngineConfig:
    """A checked config from whatever the user gave; None is the config with every default.

    Raises:
        ConfigError: naming every wrong key.
    """
    if source is None:
        return EngineConfig()
    if isinstance(source, EngineConfig):
        return source
    what = "engine config" if isinstance(source, dict) else f"engine config {str(source)!r}"
    return validated(EngineConfig, read_config(source), what)


def solve_batches(
    config: EngineConfig, world_size: int, shares: Sequence[float] = ()
) -> BatchSizes:
    """Solves the batch triangle for one world size.

    With a global and a micro batch given, any world size will do: the step's samples are split as
    evenly as possible and every rank runs the same number of micro-steps. When all three are
    given they must multiply, as in DeepSpeed.

    Args:
        shares: each rank's share of a step's samples; empty for even shares. The config is judged
            by even shares. Uneven ones keep a given micro-batch, which is a limit of memory, and
            take more micro-steps; without one they keep the micro-steps.

    Raises:
        ConfigError: the three numbers disagree, or there are fewer samples than ranks.
    """
    total = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None:
        micro, steps = micro or 1, steps or 1
        return _sized(micro * steps * world_size, micro, world_size, shares)
    if micro is not None and steps is not None and micro * steps * world_size != total:
        raise ConfigError(
            f"the batch sizes disagree: train_batch_size is {total}, but "
            f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"world size {world_size} is {micro * steps * world_size}",
            fix="leave one of the three out and it is worked out",
        )
    if total < world_size:
        raise ConfigError(
            f"train_batch_size {total} is less than the world size {world_size}",
            allowed="at least one sample a rank",
            fix="train_batch_size, or workers.max in the job file",
        )
    per_rank = ceil(total / world_size)
    even = ceil(per_rank / (steps or 1)) if micro is None else micro
    if steps is not None and ceil(per_rank / even) != steps:
        raise ConfigError(
            f"train_batch_size {total} on {world_size} ranks is {per_rank} samples a rank, which "
            f"does not make gradient_accumulation_steps {steps} micro-batches of equal size",
            fix="train_batch_size, or leave gradient_accumulation_steps out",
        )
    if micro is None:
        micro = ceil(max(rank_samples(total, world_size, shares)) / (steps or 1))
    return _sized(total, micro, world_size, shares)


def _sized(total: int, micro: int, world_size: int, shares: Sequence[float]) -> BatchSizes:
    return BatchSizes(total, micro, micro_steps(total, world_size, micro, shares), tuple(shares))
