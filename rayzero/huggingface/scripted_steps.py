"""Accelerate in a launched script that brings no DeepSpeed config: it counts the worker's ranks,
and the script's own calls clip and step.

Accelerate over DeepSpeed steps within `accelerator.backward`, and clips to the norm of a config,
1.0 by default. A script without a config is written for DDP: the step is where it calls
`optimizer.step()`, and only `accelerator.clip_grad_norm_` clips.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayzero.engine.errors import ConfigError, EngineError

_FIX = "Accelerator(gradient_accumulation_steps=N), and `with accelerator.accumulate(model):`"


def adapt_options(options: dict[str, Any]) -> None:
    """Changes the options of `Accelerator`. Raises ConfigError for what would train without the
    engine."""
    for name, variable in (("FSDP", "FSDP"), ("Megatron-LM", "MEGATRON_LM")):
        plugin = options.get(f"{variable.lower()}_plugin")
        if plugin is not None or os.environ.get(f"ACCELERATE_USE_{variable}") == "true":
            raise ConfigError(
                f"the script asks Accelerate for {name}, under `rayzero launch`",
                allowed="rayzero's engine, which shards parameters at stage 3",
                fix=f"leave {name} out of the script, and use `rayzero launch --stage 3`",
            )
    if options.get("cpu"):
        if dist.get_backend() == dist.Backend.NCCL:
            raise ConfigError(
                "Accelerator(cpu=True) on a worker with a GPU",
                allowed="cpu=True on workers without GPUs",
                fix="workers.gpus: 0, or Accelerator() without cpu=True",
            )
        options["cpu"] = False  # there, Accelerate would train by DDP


def brings_no_config(options: dict[str, Any]) -> bool:
    """Whether neither `Accelerator` nor the command line is given a DeepSpeed config."""
    plugins = options.get("deepspeed_plugin"), options.get("deepspeed_plugins")
    is_given = "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ
    return plugins == (None, None) and not is_given


def check_prepare(given: Sequence[Any]) -> None:
    """Raises ConfigError where Accelerate over DeepSpeed cannot prepare what DDP can."""
    kinds = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)
    found = [any(isinstance(it, kind) for it in given) for kind in kinds]
    if any(found[:2]) and not all(found):
        names = ("the model", "its optimizer", "the DataLoader that it is trained on")
        missing = [name for name, is_found in zip(names, found, strict=True) if not is_found]
        raise ConfigError(
            f"accelerator.prepare was called without {' and '.join(missing)}",
            allowed="one call with model, optimizer and DataLoader, and more calls for the rest",
            fix="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        )


class ScriptedSteps:
    """Replaces Accelerate's `DeepSpeedEngineWrapper`, with the same methods. Also has the
    optimizer's `step` and `zero_grad`.

    Args:
        gradient_state: Accelerate's: whether the current micro-batch ends a step.
    """

    def __init__(self, engine: Any, gradient_state: Any) -> None:
        self.engine = engine
        self._gradient_state = gradient_state
        self._tells_boundary = False

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        self._tells_boundary = True
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, **options)

    def step(self, closure: None = None) -> None:
        if not self.engine.step_is_due:
            return
        if self.engine.gradient_accumulation_steps() > 1 and not self._tells_boundary:
            raise EngineError(
                "loss.backward() in a script that accumulates gradients",
                allowed="accelerator.backward(loss), which knows whether a step ends",
            )
        self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self._gradient_state.sync_gradients:
            self.engine.zero_grad()

    def clip_and_step(self, max_norm: float, norm_type: float) -> Tensor:
        """The norm before clipping is known when all ranks have agreed on the step, so it is done
        here; `step` then finds nothing to do. Within a step, the norm of the last one."""
        if float(norm_type) != 2.0:
            raise ConfigError(f"clip_grad_norm_(norm_type={norm_type})", allowed="norm_type=2")
        if self.engine.step_is_due:
            with self.engine.clipping_to(float(max_norm)):
                self.step()
        return torch.tensor(self.get_global_grad_norm() or 0.0, device=self.engine.device)

    def get_global_grad_norm(self) -> float | None:
        norm: float | None = self.engine.get_global_grad_norm()
        return norm

    def check_stepped(self) -> None:
        """Called where the script takes a further batch. Raises ConfigError if it accumulates
        gradients by itself: a change of size, and a fault, could not keep the samples of a step."""
        if self.engine.step_is_due:
            raise ConfigError(
                "the script took another batch after accelerator.backward(loss), without "
                "optimizer.step(): it accumulates gradients, and Accelerate does not know",
                allowed=f"one optimizer.step() for each batch, or {_FIX}",
            )


def follow_script(accelerator: Any, engine: Any, prepared: Sequence[Any]) -> None:
    """Lets the script's own calls clip and step the engine."""
    steps = accelerator.deepspeed_engine_wrapped = ScriptedSteps(engine, accelerator.gradient_state)
    for it in prepared:
        if isinstance(it, torch.optim.Optimizer):  # DeepSpeedOptimizerWrapper
            vars(it).update(step=steps.step, zero_grad=steps.zero_grad)
