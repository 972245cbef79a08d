"""Training loops over the calls of DeepSpeed's engine, for DeepSpeed and for rayzero alike.

Each loop yields once for each batch of a rank, after its calls; then what the engine counts, and
its weights, are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import CONTENT_ERRORS, RayzeroError

RANKS, MICRO_BATCH, MICRO_BATCHES, SAMPLES = 2, 2, 8, 48
Batch = tuple[Tensor, Tensor]
Row = list[Any]
Loop = Callable[["Run"], Iterator[None]]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(3))
    return inputs, inputs.sum(1, keepdim=True).sin()


def own_batches(rank: int, accumulation: int) -> list[Batch]:
    """The micro-batches of a rank that rayzero's loader yields."""
    inputs, targets = make_data()
    order, batch = SampleOrder(SAMPLES, 0), MICRO_BATCH * RANKS * accumulation
    batches = []
    for step in range(MICRO_BATCHES // accumulation):
        indices = order.indices(step * batch, batch).tolist()
        for turn in range(accumulation):
            start = (rank * accumulation + turn) * MICRO_BATCH
            own = indices[start : start + MICRO_BATCH]
            batches.append((inputs[own], targets[own]))
    return batches


def make_config(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.02,
                "warmup_max_lr": 0.2,
                "warmup_num_steps": 8,
                "warmup_type": "linear",
            },
        },
        **more,
    }


class Run:
    """One loop on one rank.

    Attributes:
        gathered: DeepSpeed's `GatheredParameters`.
        rows: of each batch: global_steps, micro_steps, global_samples, whether the next micro-step
            is a boundary, whether the last step() changed the weights, lr, a sum over the weights.
    """

    def __init__(self, engine: Any, batches: Iterable[Batch], gathered: Any) -> None:
        self.engine, self.batches, self.gathered = engine, iter(batches), gathered
        self.rows: list[Row] = []
        self.held: Tensor | None = None  # the loss of a forward before its backward
        self.contexts = ExitStack()  # of the current turn

    def loss(self, batch: Batch) -> Tensor:
        held, self.held = self.held, None
        return nn.functional.mse_loss(self.engine(batch[0]), batch[1]) if held is None else held

    def note(self) -> None:
        engine = self.engine
        with torch.no_grad(), self.gathered(list(engine.module.parameters())):
            weights = torch.cat([it.detach().reshape(-1) for it in engine.module.parameters()])
        factors = torch.arange(1, len(weights) + 1, dtype=torch.float64).sqrt()
        self.rows.append(
            [
                engine.global_steps,
                engine.micro_steps,
                engine.global_samples,
                bool(engine.is_gradient_accumulation_boundary()),
                bool(engine.was_step_applied()),
                round(engine.get_lr()[0], 9),
                round(float(factors @ weights.double()), 6),
            ]
        )

    def train(self, loop: Loop) -> str:
        """The error that ended the loop, in one line; empty if it ended by itself."""
        try:
            for _ in loop(self):
                self.note()
        except (*CONTENT_ERRORS, RayzeroError) as error:
            return describe(error)
        return ""


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {}
"""{name: (loop, config beside `make_config`'s)}"""


def add(name: str, *turns: str, **config: Any) -> None:
    """A loop whose turns, one a batch, are these words in a circle; at `stop` it ends."""

    def loop(run: Run) -> Iterator[None]:
        for batch, turn in zip(run.batches, cycle(turns), strict=False):
            if turn == "stop":
                return
            with ExitStack() as run.contexts:
                for word in turn.split():
                    WORDS[word](run, batch)
            yield

    LOOPS[name] = (loop, config)


def evaluate(run: Run, batch: Batch) -> None:
    run.engine.eval()
    with torch.no_grad():
        run.loss(batch)
    run.engine.train()


def two_losses(run: Run, batch: Batch) -> None:
    loss = run.loss(batch)
    run.engine.backward(loss / 2, retain_graph=True)
    run.engine.backward(loss / 2)


def halve_grad(run: Run, _: Any) -> None:
    for param in run.engine.module.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def hook_accumulation(run: Run, _: Any) -> None:
    for param in run.engine.module.parameters():
        param.register_post_accumulate_grad_hook(lambda it: it.grad.mul_(0.5) and None)


def hook_tensors(run: Run, _: Any) -> None:
    for param in run.engine.module.parameters():
        param.register_hook(lambda grad: grad / 2)


def change_momentum(run: Run, _: Any) -> None:
    for group in run.engine.optimizer.param_groups:
        group["momentum"] = 0.5 + len(run.rows) / 20


def clamp(run: Run, _: Any) -> None:
    """Where weights are sharded through GatheredParameters."""
    params = list(run.engine.module.parameters())
    with torch.no_grad(), run.gathered(params, modifier_rank=0):
        for param in params:
            param.clamp_(-0.4, 0.4)


WORDS: dict[str, Callable[[Run, Batch], Any]] = {
    "forward": lambda run, batch: setattr(run, "held", run.loss(batch)),
    "backward": lambda run, batch: run.engine.backward(run.loss(batch)),
    "half": lambda run, batch: run.engine.backward(run.loss(batch) / 2),
    "divided": lambda run, batch: run.engine.backward(run.loss(batch) / 2, scale_wrt_gas=False),
    "two_losses": two_losses,
    "next_backward": lambda run, _: run.engine.backward(run.loss(next(run.batches))),
    "own": lambda run, batch: run.loss(batch).backward(),
    "scaled": lambda run, batch: run.engine.scale(run.loss(batch)).backward(),
    "step": lambda run, _: run.engine.step(),
    "step_if_due": lambda run, _: (
        run.engine.is_gradient_accumulation_boundary() and run.engine.step()
    ),
    "step_optimizer": lambda run, _: run.engine.optimizer.step(),
    "step_schedule": lambda run, _: run.engine.lr_scheduler.step(),
    "more_follow": lambda run, _: run.engine.set_gradient_accumulation_boundary(False),
    "is_last": lambda run, _: run.engine.set_gradient_accumulation_boundary(True),
    "no_sync": lambda run, _: run.contexts.enter_context(run.engine.no_sync()),
    "coalesce": lambda run, _: run.contexts.enter_context(run.engine.coalesce_grad_reduction()),
    "leave": lambda run, _: run.contexts.close(),
    "zero_grad": lambda run, _: run.engine.zero_grad(),
    "zero_grad_of_optimizer": lambda run, _: run.engine.optimizer.zero_grad(),
    "evaluate": evaluate,
    "freeze": lambda run, _: run.engine.module[0].requires_grad_(False),
    "unfreeze": lambda run, _: run.engine.module[0].requires_grad_(True),
    "halve_grad": halve_grad,
    "hook_tensors": hook_tensors,
    "hook_accumulation": hook_accumulation,
    "change_momentum": change_momentum,
    "clamp": clamp,
}

EACH = "backward step"
ONE = {"gradient_accumulation_steps": 1}
UNMANAGED = {"managed_gradient_accumulation": False}

add("step_at_each", EACH)
add("step_at_each_and_stop_within_a_step", *5 * [EACH], "stop")
add("step_at_the_boundary_only", "backward", EACH)
add("step_if_the_engine_says_boundary", "backward step_if_due")
add("declare_the_boundary", "more_follow backward", "is_last backward step")  # as Accelerate does
add("declare_the_boundary_and_step_at_each", "more_follow backward step", "is_last backward step")
add("declare_another_accumulation", *3 * ["more_follow backward"], "is_last backward step")
add("no_sync_without_accumulation", "no_sync backward", EACH, **ONE)
add("no_sync_within_accumulation", "no_sync backward", EACH)
# As FSDP's and DDP's users write it: every micro-step has its step().
add("no_sync_around_all_but_step", "no_sync backward leave step", EACH)
add("step_inside_no_sync", "no_sync backward step")
add("two_losses_of_a_batch", "half half step")
add("two_losses_without_accumulation", "half half step", **ONE)
add("two_losses_of_one_forward", "two_losses step")
add("a_backward_without_step", *2 * [EACH], "backward", *5 * [EACH])
add("step_without_backward", *3 * [EACH], "step", *4 * [EACH])
add("step_twice", "backward step step", **ONE)
add("step_the_optimizer", "backward", "backward step_optimizer")
add("step_the_schedule", "backward step step_schedule")  # the engine does it as well
add("divided_loss", "divided step")
add("own_backward", "own step")
add("scaled_own_backward", "scaled step")
add("own_backward_at_the_boundary_only", "own", "own step")
add("zero_grad_before_each_backward", "forward zero_grad backward step")
add("optimizer_zero_grad_before_each_backward", "forward zero_grad_of_optimizer backward step")
add("zero_grad_after_each_step_of_the_weights", EACH, f"{EACH} zero_grad zero_grad_of_optimizer")
add("zero_grad_between_two_backwards", "backward zero_grad", EACH, **ONE)
add("evaluate_between_micro_steps", "backward step evaluate")
STEP_AFTER = [EACH if turn in (0, 2, 5, 7) else "backward" for turn in range(MICRO_BATCHES)]
add("unmanaged", *STEP_AFTER, **UNMANAGED)
add("unmanaged_without_accumulation", *STEP_AFTER, **UNMANAGED, **ONE)
add("unmanaged_own_backward", "own", "own step", **UNMANAGED)
TWO_COALESCED = "coalesce backward next_backward leave step"
add("coalesced", TWO_COALESCED, **ONE)
add("coalesced_within_accumulation", TWO_COALESCED)
add("coalesced_and_declared", f"is_last {TWO_COALESCED}")
add("coalesced_losses_of_a_batch", "coalesce half half leave step", **ONE)
add("step_inside_coalesce", "coalesce backward step", **ONE)
add("coalesce_inside_coalesce", "coalesce coalesce backward leave step", **ONE)
add("coalesce_inside_no_sync", "no_sync coalesce backward leave step", **ONE)
add("coalesce_unmanaged", "coalesce backward leave step", **UNMANAGED)
add("freeze_on_the_way", *4 * [EACH], f"freeze {EACH}", *3 * [EACH])  # a layer with momentum
add("freeze_and_unfreeze", EACH, EACH, f"freeze {EACH}", EACH, f"unfreeze {EACH}", *3 * [EACH])
add("halve_gradients_by_tensor_hooks", f"hook_tensors {EACH}", *7 * [EACH])
add("halve_gradients_in_grad", "backward halve_grad step")
add("halve_gradients_by_accumulation_hooks", f"hook_accumulation {EACH}", *7 * [EACH])
add("set_lr_on_the_way", f"change_momentum {EACH}")
add("clamp_weights", EACH, f"{EACH} clamp")
