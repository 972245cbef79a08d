"""Configurations of the engine in which it must not race.

Every combination of the main settings, and rows of a covering array with every allowed triple of
values of all settings. A new setting that changes what runs when is a new axis here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, product
from tempfile import gettempdir
from typing import Any

from tests.support.covering import covering
from tests.support.races.models import MODELS, SAMPLES

SCRIPTS = ("plain", "own backward", "access", "empty batch", "load", "mirror")
"""What a script does around its steps: see `scripts`."""

_NVME = {"device": "nvme", "nvme_path": gettempdir(), "buffer_count": 3}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "nvme": {"offload_optimizer": _NVME, "sub_group_size": 512},
    "weights": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme and weights": {
        "offload_optimizer": _NVME,
        "offload_param": {"device": "cpu"},
        "sub_group_size": 512,
    },
}
_STAGE_3_OFFLOADS = {"weights", "both", "nvme and weights"}
AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "micro_steps": (1, 3),
    "offload": tuple(OFFLOADS),
    "gradients": ("plain", "fp16", "int8", "sign", "lowrank"),
    "weights": ("plain", "int8", "hpz", "int8 and hpz"),
    "optimizer": ("AdamW", "SGD", "Lion", "Muon", "Lamb", "Adagrad", "OneBitAdam"),
    "overlap": (True, False),
    "bucket": (150, 1_000_000),
    "gather_buffers": (2, 3),
    "each_micro_step": (True, False),
    "reshard": (True, False),
    "world_size": (1, 2, 4),
    "script": SCRIPTS,
}
_ARRAYS = 6  # covering arrays of the whole: each has every pair of values
_WHOLE_PARAMS = {"Muon", "Lamb"}


@dataclass(frozen=True)
class Case:
    """One configuration; the defaults are those of the core product."""

    model: str = "stack"
    stage: int = 2
    precision: str = "bf16"
    micro_steps: int = 2
    offload: str = "none"
    gradients: str = "plain"
    weights: str = "plain"
    optimizer: str = "AdamW"
    overlap: bool = True
    bucket: int = 150
    gather_buffers: int = 2
    each_micro_step: bool = True
    reshard: bool = True
    world_size: int = 2
    script: str = "plain"

    def __str__(self) -> str:
        """What differs from the defaults."""
        default = asdict(Case())
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != default[k]) or "default"

    def config(self) -> dict[str, Any]:
        """The engine's config file."""
        rayzero: dict[str, Any] = {"gather_buffers": self.gather_buffers}
        rayzero["reduce_each_micro_step"] = self.each_micro_step
        rayzero["reshard_after_forward"] = self.reshard
        if self.model == "decoder":  # its embedding and head are blocks of their own
            rayzero["unshard_min_numel"] = 128
        if self.gradients != "plain":
            rayzero["compression"] = {"gradients": self.gradients}
        params: dict[str, Any] = {"lr": 1e-3}
        if self.optimizer == "OneBitAdam":
            params["freeze_step"] = 2
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": 0.0 if self.optimizer == "OneBitAdam" else 0.5,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {
                "enabled": self.precision == "fp16",
                "initial_scale_power": 8,
                "auto_cast": True,
            },
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.overlap,
                "reduce_bucket_size": self.bucket,
                "zero_quantized_weights": "int8" in self.weights,
                "zero_hpz_partition_size": 2 if "hpz" in self.weights else 1,
                **OFFLOADS[self.offload],
            },
            "rayzero": rayzero,
        }


def allowed(row: dict[str, Any]) -> bool:
    """Whether the engine accepts a configuration, or a part of one that can be completed."""
    stage, offload = row.get("stage"), row.get("offload", "none")
    needs_stage_3 = (
        row.get("weights", "plain") != "plain"
        or row.get("gather_buffers", 2) != 2
        or not row.get("reshard", True)
        or offload in _STAGE_3_OFFLOADS
    )
    once_a_step = not row.get("each_micro_step", True)
    if once_a_step and (stage in (0, 1) or row.get("micro_steps", 3) == 1):
        return False
    if row.get("optimizer") == "OneBitAdam" and once_a_step:
        return False
    if row.get("optimizer") == "OneBitAdam":
        plain = row.get("gradients", "plain") == "plain" and offload == "none"
        return plain and stage in (None, 0) and row.get("precision") != "fp16" and not needs_stage_3
    weights = row.get("weights", "plain")
    if weights != "plain" and offload in _STAGE_3_OFFLOADS:
        return False
    if "hpz" in weights and row.get("world_size") == 1:
        return False
    if row.get("optimizer") in _WHOLE_PARAMS and offload != "none":
        return False
    return stage in (None, 3) or not needs_stage_3


def core_cases() -> Iterator[Case]:
    """Every combination of the main settings."""
    main = ("model", "stage", "precision", "micro_steps", "offload")
    for values in product(*(AXES[name] for name in main)):
        row = dict(zip(main, values, strict=True))
        if row["precision"] == "fp16" or row["model"] == "recomputed":
            continue
        if allowed(row):
            yield Case(**row)


def covering_cases(strength: int, seed: int = 0) -> Iterator[Case]:
    """Rows with every allowed combination of `strength` settings' values."""
    for row in covering(AXES, strength, allowed, seed):
        yield Case(**row)


def all_cases(seed: int = 0) -> list[Case]:
    """The whole: at least 500."""
    arrays = (covering_cases(2, seed + number) for number in range(_ARRAYS))
    return list(dict.fromkeys(chain(core_cases(), *arrays)))


def sample_cases(seed: int = 0) -> list[Case]:
    """Every allowed pair of values."""
    return list(covering_cases(2, seed))


def mutant_cases() -> list[Case]:
    """A few that together run every wait; small ones first."""
    stage_3 = {"stage": 3, "micro_steps": 1}
    return [
        Case(micro_steps=3),
        Case(stage=3),
        Case(stage=0, micro_steps=1),
        Case(stage=1),
        Case(each_micro_step=False),
        Case(stage=3, each_micro_step=False),
        Case(stage=1, offload="optimizer"),
        Case(offload="optimizer", micro_steps=3),
        Case(stage=3, offload="both"),
        Case(**stage_3, offload="weights", gather_buffers=3),
        Case(**stage_3, model="decoder", precision="fp32"),
        Case(stage=1, overlap=False, precision="fp32"),
        Case(offload="half", precision="fp32", model="irregular"),
        Case(gradients="int8", offload="optimizer"),
        Case(stage=0, gradients="sign"),
        Case(gradients="lowrank"),
        Case(**stage_3, weights="int8 and hpz", world_size=4),
        Case(**stage_3, weights="int8"),
        Case(optimizer="Muon", micro_steps=1),
        Case(optimizer="Lamb", micro_steps=1),
        Case(stage=0, optimizer="OneBitAdam", micro_steps=1),
        Case(stage=1, offload="nvme", micro_steps=1),
        Case(stage=1, offload="nvme", micro_steps=1, precision="fp32"),
        Case(stage=1, offload="optimizer", precision="fp32"),
        Case(**stage_3, offload="nvme and weights"),
        Case(stage=3, model="irregular", gather_buffers=3),
        Case(stage=3, model="recomputed", overlap=False),
        Case(stage=0, overlap=False, micro_steps=1),
        Case(gradients="lowrank", bucket=1_000_000),
        Case(stage=3, model="branching"),
        Case(stage=3, reshard=False, model="decoder"),
        Case(stage=3, offload="both", world_size=1),
        Case(model="branching", script="access"),
        Case(stage=1, model="irregular", script="access", offload="optimizer", precision="fp32"),
        Case(stage=3, script="access"),
        Case(precision="fp32", script="empty batch"),
        Case(precision="fp32", optimizer="Lion", script="load"),
        Case(stage=1, precision="fp32", offload="optimizer", script="load"),
        Case(stage=3, precision="fp32", model="branching", script="load"),
        Case(stage=3, offload="both", precision="fp32", script="load"),
        Case(stage=0, script="own backward"),
        Case(stage=1, script="own backward", offload="optimizer"),
        Case(stage=3, script="own backward", model="decoder"),
        Case(script="mirror", model="irregular"),
        Case(script="mirror", gradients="lowrank"),
        Case(stage=3, offload="both", precision="fp32", script="mirror"),
        Case(script="mirror", optimizer="Muon"),
    ]
