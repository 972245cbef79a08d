"""Changes of a model's forward by the number of finished steps: curriculum, layer and token drop.

The changes are pure functions of the step, so they continue after a repair or a resize, and from a
checkpoint.
Sources: curriculum by sequence length, Li et al. 2022; progressive layer drop, Zhang and He 2020;
random layerwise token dropping, Yao et al. 2022.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.data_efficiency import CurriculumConfig, LayerDropConfig, RandomLtdConfig
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import ConfigError
from rayzero.engine.tensor_tree import iter_tensors, map_tensors


def difficulty(
    config: CurriculumConfig, step: int, custom: Callable[[int], int] | None = None
) -> int:
    """Returns the difficulty of a step; steps are counted from 1. Raises ConfigError if the
    schedule is custom and there is no function."""
    schedule = config.schedule_config
    low, high = config.min_difficulty or 1, config.max_difficulty or 1
    if config.schedule_type == "custom":
        if custom is None:
            raise ConfigError(
                "curriculum_learning.schedule_type is custom, and there is no function",
                fix="call engine.set_custom_curriculum_learning_schedule(function of the step)",
            )
        return int(custom(step))
    if config.schedule_type == "fixed_discrete":
        passed = sum(step > last for last in schedule.max_step)
        return schedule.difficulty[passed]
    degree = schedule.root_degree if config.schedule_type == "fixed_root" else 1.0
    grown = (step / (schedule.total_curriculum_step or 1)) ** (1 / degree)
    return _grow(low, high, grown, schedule.difficulty_step)


def keep_probability(config: LayerDropConfig, step: int) -> float:
    """Returns progressive layer drop's theta after `step` finished steps."""
    return (1.0 - config.theta) * math.exp(-config.gamma * step) + config.theta


def kept_tokens(config: RandomLtdConfig, step: int) -> int:
    """Returns how many tokens random-LTD keeps after `step` finished steps."""
    schedule, steps = config.random_ltd_schedule, config.random_ltd_schedule.schedule_config
    low, high = schedule.min_value or 1, schedule.max_value or 1
    return _grow(low, high, step / (steps.require_steps or 1), steps.seq_per_step)


def _grow(low: int, high: int, grown: float, multiple: int) -> int:
    """Returns the value at the fraction `grown` of the way from `low` to `high`, rounded down to a
    multiple of `multiple`: at least the first multiple that is not below `low`, at most `high`."""
    value = math.floor(low + grown * (high - low))
    return min(max(value - value % multiple, -(-low // multiple) * multiple), high)


class ScheduledInputs:
    """Changes a model's inputs in training as the config's schedules say. `custom` is the function
    of a custom curriculum. Used by the training thread."""

    def __init__(self, config: EngineConfig, progress: TrainingProgress) -> None:
        self._curriculum = config.curriculum_learning
        self._layer_drop = config.progressive_layer_drop
        self._progress = progress
        self.custom: Callable[[int], int] | None = None

    @property
    def keep_probability(self) -> float:
        """The probability of keeping a layer in the current step."""
        return keep_probability(self._layer_drop, self._progress.step)

    def apply(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the changed inputs of a forward."""
        if not model.training:
            return args, kwargs
        if self._layer_drop.enabled:
            _check_takes_layer_drop(model)
            kwargs = kwargs | {"progressive_layer_drop": True, "pld_theta": self.keep_probability}
        if self._curriculum.enabled:
            length = difficulty(self._curriculum, self._progress.step + 1, self.custom)
            if "curriculum_seqlen" in inspect.signature(model.forward).parameters:
                return args, kwargs | {"curriculum_seqlen": length}
            args, kwargs = _cut((args, kwargs), length)
        return args, kwargs


def _check_takes_layer_drop(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(param.kind is param.VAR_KEYWORD for param in parameters.values())
    missing = [name for name in ("progressive_layer_drop", "pld_theta") if name not in parameters]
    if missing and not takes_any:
        raise ConfigError(
            f"progressive_layer_drop is enabled, and {type(model).__name__}.forward takes no "
            f"{' and no '.join(missing)}",
            allowed="forward(..., progressive_layer_drop=False, pld_theta=1.0), which skips each "
            "layer with a probability that follows from pld_theta",
            fix='set progressive_layer_drop: {"enabled": false} in the engine config',
        )


def _cut(inputs: Any, length: int) -> Any:
    """Cuts dimension 1 of the inputs' tensors to `length`. The first tensor that has a dimension 1
    tells the sequence length; tensors of another length there are not cut."""
    lengths = [tensor.shape[1] for tensor in iter_tensors(inputs) if tensor.ndim > 1]
    if not lengths or lengths[0] <= length:
        return inputs

    def cut(tensor: Tensor) -> Tensor:
        is_sequence = tensor.ndim > 1 and tensor.shape[1] == lengths[0]
        return tensor[:, :length] if is_sequence else tensor

    return map_tensors(inputs, cut)


class TokenDropLayer:
    """Random-LTD's hooks on one layer: its input is cut to random tokens, in their order, and its
    output is put back between the tokens that skip the layer.

    `count` returns how many tokens are kept at present. The indices come from torch's generator,
    which is part of the training state; a recomputed forward draws the same indices.
    """

    def __init__(self, layer: nn.Module, config: RandomLtdConfig, count: Callable[[], int]) -> None:
        self._config, self._count = config, count
        self._dim = 1 if config.hidden_state_order == "batch_seq_dim" else 0
        self._skipped: tuple[Tensor, Tensor] | None = None  # hidden states, indices
        layer.register_forward_pre_hook(self._gather, with_kwargs=True)
        layer.register_forward_hook(self._scatter)

    def _gather(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._skipped = None
        hidden = args[0] if args else kwargs["hidden_states"]
        length, kept = hidden.shape[self._dim], self._count()
        if not layer.training or kept >= length:
            return args, kwargs
        batch = hidden.shape[1 - self._dim]
        noise = torch.rand(batch, length, device=hidden.device)
        index = noise.topk(kept, dim=1).indices.sort(dim=1).values
        self._skipped = hidden, index
        part = hidden.gather(self._dim, self._expanded(index, hidden))
        if (name := self._config.model_mask_name) is not None and kwargs.get(name) is not None:
            kwargs = kwargs | {name: self._cut_mask(kwargs[name], index)}
        if args:
            return (part, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": part}

    def _scatter(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._skipped is None:
            return output
        (hidden, index), self._skipped = self._skipped, None
        part = output[0] if isinstance(output, tuple) else output
        whole = hidden.scatter(self._dim, self._expanded(index, hidden), part.to(hidden.dtype))
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _expanded(self, index: Tensor, hidden: Tensor) -> Tensor:
        index = index if self._dim else index.t()
        return index.unsqueeze(-1).expand(*index.shape, hidden.shape[-1])

    def _cut_mask(self, mask: Tensor, index: Tensor) -> Tensor:
        """Cuts a mask of shape (..., length) or (..., length, length): a decoder's to the first
        tokens, an encoder's to the tokens that each sample keeps."""
        kept = index.shape[1]
        if self._config.model_type == "decoder":
            return mask[..., :kept, :kept]
        for dim in range(2, mask.ndim):
            if mask.shape[dim] > 1:
                shape = [len(index)] + [1] * (mask.ndim - 1)
                shape[dim] = kept
                sizes = [*mask.shape]
                sizes[0], sizes[dim] = len(index), kept
                mask = mask.expand(len(index), *mask.shape[1:])
                mask = mask.gather(dim, index.view(shape).expand(sizes))
        return mask


def drop_tokens(
    model: nn.Module,
    layer_type: type[nn.Module],
    config: RandomLtdConfig,
    progress: TrainingProgress,
) -> None:
    """Puts random-LTD's hooks on those layers of type `layer_type` whose numbers the config lists.
    Raises ConfigError if the model has too few layers of that type."""
    layers = [module for module in model.modules() if isinstance(module, layer_type)]
    if max(config.random_ltd_layer_id, default=-1) >= len(layers):
        raise ConfigError(
            f"random_ltd_layer_id is {list(config.random_ltd_layer_id)}, and the model has "
            f"{len(layers)} layers of type {layer_type.__name__}",
            allowed="numbers from 0",
        )
    for number in sorted(config.random_ltd_layer_id):
        TokenDropLayer(layers[number], config, lambda: kept_tokens(config, progress.step))
