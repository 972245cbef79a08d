"""Accelerate in a launched script without a DeepSpeed config: Accelerate counts the worker's ranks,
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
    """Changes the options of `Accelerator`. Raises ConfigError for options with which Accelerate
    would train without the engine."""
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
                fix="set workers.gpus: 0, or call Accelerator() without cpu=True",
            )
        options["cpu"] = False  # with cpu=True, Accelerate trains by DDP


def brings_no_config(options: dict[str, Any]) -> bool:
    """Returns whether neither `Accelerator` nor the command line has a DeepSpeed config."""
    plugins = options.get("deepspeed_plugin"), options.get("deepspeed_plugins")
    is_given = "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ
    return plugins == (None, None) and not is_given


def check_prepare(given: Sequence[Any], *, knows_batch: bool = False) -> None:
    """Raises ConfigError where Accelerate over DeepSpeed cannot prepare what DDP can.

    `knows_batch`: the batch size is known from an earlier model's DataLoader.
    """
    kinds = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)
    found = [any(isinstance(item, kind) for item in given) for kind in kinds]
    found[2] = found[2] or knows_batch
    if any(found[:2]) and not all(found):
        names = ("the model", "its optimizer", "the DataLoader that it is trained on")
        missing = [name for name, is_found in zip(names, found, strict=True) if not is_found]
        raise ConfigError(
            f"accelerator.prepare was called without {' and '.join(missing)}",
            allowed="one call with model, optimizer and DataLoader, and more calls for the rest",
            fix="call model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        )


def split_models(given: Sequence[Any], *, scripted: bool) -> list[list[int]]:
    """Returns, for each model, the positions of the arguments of `prepare` that belong to it: the
    model, its optimizer and its schedules. All other arguments go with the first model. Accelerate
    over DeepSpeed prepares one model a call.

    Raises:
        ConfigError: there are several models, and the script brings a config (not `scripted`), or
            one of the models has no optimizer.
    """
    places = range(len(given))
    models = [place for place in places if isinstance(given[place], nn.Module)]
    if len(models) < 2:
        return [[*places]]
    if not scripted:
        raise ConfigError(
            f"accelerator.prepare was called with {len(models)} models and a DeepSpeed config: "
            "Accelerate would put the last one in the place of all",
            allowed="one model in each call, with an Accelerator of its own",
            fix="leave the config out of the script, and use `rayzero launch --stage`",
        )
    parts = {model: [model] for model in models}
    for place in places:
        if place in parts:
            continue
        optimizer = getattr(given[place], "optimizer", given[place])  # of a schedule, or itself
        groups = getattr(optimizer, "param_groups", ())
        trained = {id(param) for group in groups for param in group["params"]}
        owner = next((model for model in models if _has_one_of(given[model], trained)), models[0])
        parts[owner].append(place)
    for model, part in parts.items():
        if not any(isinstance(given[place], torch.optim.Optimizer) for place in part):
            raise ConfigError(
                f"accelerator.prepare was called with a {type(given[model]).__name__} without its "
                "optimizer, next to other models",
                allowed="models that are trained, each with an optimizer of its own",
                fix="call model.to(accelerator.device) instead, for a model that only evaluates",
            )
    return [*parts.values()]


def _has_one_of(model: nn.Module, params: set[int]) -> bool:
    return any(id(param) in params for param in model.parameters())


class ScriptedSteps:
    """Replaces Accelerate's `DeepSpeedEngineWrapper`, with the same methods. Also has the
    optimizer's `step` and `zero_grad`.

    Args:
        gradient_state: Accelerate's, which tells whether the current micro-batch ends a step.
    """

    def __init__(self, engine: Any, gradient_state: Any) -> None:
        self.engine = engine
        self._gradient_state = gradient_state
        self._tells_boundary = False

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        self.tell_boundary(sync_gradients)
        self.engine.backward(loss, **options)

    def tell_boundary(self, is_boundary: bool) -> None:
        self._tells_boundary = True
        self.engine.set_gradient_accumulation_boundary(is_boundary)

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
        """Clips and steps; returns the norm before clipping, or within a step the norm of the
        previous one. The norm is known only when all ranks have voted on the step, so the step is
        made here, and the script's `step` then finds nothing to do."""
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
        """Called where the script takes a further batch. Raises ConfigError if the script
        accumulates gradients by itself: after a resize or a fault the samples of a step would
        differ."""
        if self.engine.step_is_due:
            raise ConfigError(
                "the script took another batch after accelerator.backward(loss), without "
                "optimizer.step(): it accumulates gradients, and Accelerate does not know",
                allowed=f"one optimizer.step() for each batch, or {_FIX}",
            )


class SeveralSteps:
    """Replaces `ScriptedSteps` in a script that trains several engines, such as a GAN. A backward
    reaches the engines whose outputs its loss depends on. Each engine adds up its gradients until
    its optimizer's `step` or `zero_grad`, as with DDP. The engines report no loss."""

    def __init__(self, each: list[ScriptedSteps]) -> None:
        self.each = each
        self.engine = self  # on which `Accelerator.end_training` calls `destroy`

    def destroy(self) -> None:
        for steps in self.each:
            steps.engine.destroy()

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        for steps in self.each:
            if steps.engine.fp16_enabled():
                raise ConfigError(
                    "accelerator.backward(loss) in fp16, with several models",
                    allowed="bf16, or no mixed precision, where one loss may reach several models",
                    fix='use Accelerator(mixed_precision="bf16")',
                )
            steps.tell_boundary(sync_gradients)
        loss.backward(**options)

    def of(self, parameters: Sequence[Any]) -> ScriptedSteps:
        """Returns the steps of the engine that has all `parameters`. Raises ConfigError if none
        has."""
        wanted = {id(param) for param in parameters}
        for steps in self.each:
            if wanted <= {id(param) for param in steps.engine.module.parameters()}:
                return steps
        raise ConfigError(
            "clip_grad_norm_ of parameters of several models",
            allowed="one call for each model, with its parameters",
        )

    def get_global_grad_norm(self) -> float | None:
        return self.each[0].get_global_grad_norm()

    def check_stepped(self) -> None:
        """Raises as `ScriptedSteps.check_stepped` if all engines have a step due. A single engine
        may keep gradients from another engine's loss."""
        if all(steps.engine.step_is_due for steps in self.each):
            self.each[0].check_stepped()


def follow_script(accelerator: Any, engine: Any, prepared: Sequence[Any]) -> None:
    """Lets the script's own calls clip and step the engine."""
    steps = ScriptedSteps(engine, accelerator.gradient_state)
    before = getattr(accelerator, "rayzero_steps", [])
    accelerator.rayzero_steps = each = [*before, steps]
    accelerator.deepspeed_engine_wrapped = SeveralSteps(each) if before else steps
    for item in prepared:
        if isinstance(item, torch.optim.Optimizer):  # DeepSpeedOptimizerWrapper
            vars(item).update(step=steps.step, zero_grad=steps.zero_grad)
