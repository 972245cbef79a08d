"""Sections whose effect depends on the step: curriculum, progressive layer drop, random-LTD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rayzero.engine.config.fields import (
    ConfigSection,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFraction,
)
from rayzero.engine.config.keys import implemented

_CustomName = Annotated[
    Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class CurriculumScheduleConfig(ConfigSection):
    """How the difficulty grows; which keys apply depends on `schedule_type`."""

    total_curriculum_step: PositiveInt | None = implemented(
        None, "fixed_linear, fixed_root: steps until the highest difficulty"
    )
    difficulty_step: PositiveInt = implemented(
        8, "fixed_linear, fixed_root: difficulties are multiples of this number"
    )
    root_degree: PositiveFloat = implemented(2.0, "fixed_root: 2 for the square root")
    difficulty: tuple[PositiveInt, ...] = implemented((), "fixed_discrete: the difficulties")
    max_step: tuple[PositiveInt, ...] = implemented(
        (), "fixed_discrete: the last step of each difficulty but the last"
    )


class CurriculumConfig(ConfigSection):
    """DeepSpeed's curriculum of older versions: short sequences first."""

    enabled: bool = implemented(
        False,
        "sequences are cut to a length that grows with the step: forward gets the length as "
        "curriculum_seqlen or, if it has no such argument, tensors that are cut in dimension 1",
        group="curriculum and dropped layers",
    )
    curriculum_type: Literal["seqlen"] = implemented("seqlen", "what is difficult: long sequences")
    min_difficulty: PositiveInt | None = implemented(None, "the sequence length at the start")
    max_difficulty: PositiveInt | None = implemented(None, "the sequence length at the end")
    schedule_type: _CustomName = implemented(
        "fixed_linear",
        "fixed_linear, fixed_root, fixed_discrete, or custom: a function of the step, see "
        "engine.set_custom_curriculum_learning_schedule",
    )
    schedule_config: CurriculumScheduleConfig = CurriculumScheduleConfig()


class LayerDropConfig(ConfigSection):
    """Progressive layer drop (Zhang and He, 2020), of older versions of DeepSpeed."""

    enabled: bool = implemented(
        False,
        "forward gets progressive_layer_drop=True and pld_theta, the probability of keeping a "
        "layer, (1 - theta) exp(-gamma step) + theta; the model drops its layers",
    )
    theta: UnitFraction = implemented(1.0, "the probability at the end")
    gamma: NonNegativeFloat = implemented(0.001, "how fast the probability falls")


class TokenDropStepsConfig(ConfigSection):
    """Steps of random-LTD's schedule."""

    require_steps: PositiveInt | None = implemented(None, "steps until all tokens are kept")
    seq_per_step: PositiveInt = implemented(8, "numbers of kept tokens are multiples of this")


class TokenDropScheduleConfig(ConfigSection):
    """How many tokens random-LTD keeps."""

    min_value: PositiveInt | None = implemented(None, "kept tokens in the first step")
    max_value: PositiveInt | None = implemented(None, "kept tokens in the end")
    schedule_type: Literal["fixed_linear"] = implemented("fixed_linear", "the schedule")
    schedule_config: TokenDropStepsConfig = TokenDropStepsConfig()


class RandomLtdConfig(ConfigSection, path="data_efficiency.data_routing.random_ltd"):
    """Random layerwise token dropping (Yao et al., 2022)."""

    enabled: bool = implemented(
        False,
        "middle layers, chosen by convert_to_random_ltd, train on a random part of the tokens "
        "that grows with the step; the other tokens skip the layer",
    )
    random_ltd_layer_num: PositiveInt | None = implemented(
        None, "number of layers that drop tokens; the length of random_ltd_layer_id"
    )
    random_ltd_layer_id: tuple[NonNegativeInt, ...] = implemented(
        (), "the layers that drop tokens, by their index in the model's order"
    )
    model_mask_name: str | None = implemented(
        None, "name of the layer's argument for the attention mask; the mask is cut, too"
    )
    model_type: Literal["decoder", "encoder"] = implemented(
        "decoder", "decoder: one triangular mask for all samples; encoder: a mask for each sample"
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = implemented(
        "batch_seq_dim", "dimensions of the hidden states"
    )
    random_ltd_schedule: TokenDropScheduleConfig = TokenDropScheduleConfig()


class DataRoutingConfig(ConfigSection):
    """Data routing."""

    enabled: bool = implemented(False, "random_ltd applies")
    random_ltd: RandomLtdConfig = RandomLtdConfig()


class DataEfficiencyConfig(ConfigSection, path="data_efficiency"):
    """DeepSpeed's data efficiency library."""

    enabled: bool = implemented(
        False, "data_routing applies", group="curriculum and dropped layers"
    )
    data_routing: DataRoutingConfig = DataRoutingConfig()

    @property
    def token_drop(self) -> RandomLtdConfig | None:
        """Random-LTD's section; None if it does not apply."""
        on = self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled
        return self.data_routing.random_ltd if on else None


def find_schedule_errors(
    curriculum: CurriculumConfig, efficiency: DataEfficiencyConfig
) -> Iterator[str]:
    """Yields a line for every key that an enabled schedule needs and that is missing or wrong."""
    if curriculum.enabled:
        needed = {name: getattr(curriculum, name) for name in ("min_difficulty", "max_difficulty")}
        steps, kind = curriculum.schedule_config, curriculum.schedule_type
        if kind in ("fixed_linear", "fixed_root"):
            needed["schedule_config.total_curriculum_step"] = steps.total_curriculum_step
        elif kind == "fixed_discrete" and len(steps.difficulty) != len(steps.max_step) + 1:
            yield (
                "curriculum_learning.schedule_config: difficulty must have one value more than "
                "max_step"
            )
        yield from _missing("curriculum_learning", needed)
    if (ltd := efficiency.token_drop) is not None:
        schedule, path = ltd.random_ltd_schedule, "data_efficiency.data_routing.random_ltd"
        needed = {
            "random_ltd_schedule.min_value": schedule.min_value,
            "random_ltd_schedule.max_value": schedule.max_value,
            "random_ltd_schedule.schedule_config.require_steps": (
                schedule.schedule_config.require_steps
            ),
        }
        yield from _missing(path, needed)
        if ltd.random_ltd_layer_num not in (None, len(ltd.random_ltd_layer_id)):
            yield f"{path}.random_ltd_layer_num: must be the length of random_ltd_layer_id"


def _missing(section: str, needed: dict[str, Any]) -> Iterator[str]:
    for name, value in needed.items():
        if value is None:
            yield f"{section}.{name}: this key is required"
