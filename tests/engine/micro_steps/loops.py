"""Training loops over the calls of DeepSpeed's engine, for DeepSpeed and for rayzero alike.

Each loop yields once for each batch of a rank, after its calls; then what the engine counts, and
its weights, are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        self.engine, self.batches, self.gathered = engine, batches, gathered
        self.rows: list[Row] = []

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.engine(inputs), targets)

    def backward(self, batch: Batch) -> None:
        self.engine.backward(self.loss(batch))

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


def named(**config: Any) -> Callable[[Loop], Loop]:
    def add(loop: Loop) -> Loop:
        LOOPS[loop.__name__] = (loop, config)
        return loop

    return add


@named()
def step_at_each(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.backward(batch)
        run.engine.step()
        yield


@named()
def step_at_each_and_stop_within_a_step(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        if turn == 5:
            return
        run.backward(batch)
        run.engine.step()
        yield


@named()
def step_at_the_boundary_only(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn % 2 == 1:
            run.engine.step()
        yield


@named()
def step_if_the_engine_says_boundary(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.backward(batch)
        if run.engine.is_gradient_accumulation_boundary():
            run.engine.step()
        yield


@named()
def declare_the_boundary(run: Run) -> Iterator[None]:
    """As Accelerate does."""
    for turn, batch in enumerate(run.batches):
        run.engine.set_gradient_accumulation_boundary(turn % 2 == 1)
        run.backward(batch)
        if turn % 2 == 1:
            run.engine.step()
        yield


@named()
def declare_the_boundary_and_step_at_each(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.engine.set_gradient_accumulation_boundary(turn % 2 == 1)
        run.backward(batch)
        run.engine.step()
        yield


@named()
def declare_another_accumulation(run: Run) -> Iterator[None]:
    """Of four batches, where the config says two."""
    for turn, batch in enumerate(run.batches):
        run.engine.set_gradient_accumulation_boundary(turn % 4 == 3)
        run.backward(batch)
        if turn % 4 == 3:
            run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def no_sync_without_accumulation(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        if turn % 2 == 0:
            with run.engine.no_sync():
                run.backward(batch)
        else:
            run.backward(batch)
            run.engine.step()
        yield


@named()
def no_sync_within_accumulation(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        if turn % 2 == 0:
            with run.engine.no_sync():
                run.backward(batch)
        else:
            run.backward(batch)
            run.engine.step()
        yield


@named()
def no_sync_around_all_but_step(run: Run) -> Iterator[None]:
    """As FSDP's and DDP's users write it: every micro-step has its step()."""
    for turn, batch in enumerate(run.batches):
        if turn % 2 == 0:
            with run.engine.no_sync():
                run.backward(batch)
        else:
            run.backward(batch)
        run.engine.step()
        yield


@named()
def step_inside_no_sync(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.no_sync():
            run.backward(batch)
            run.engine.step()
        yield


@named()
def two_losses_of_a_batch(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.engine.backward(run.loss(batch) / 2)
        run.engine.backward(run.loss(batch) / 2)
        run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def two_losses_without_accumulation(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.engine.backward(run.loss(batch) / 2)
        run.engine.backward(run.loss(batch) / 2)
        run.engine.step()
        yield


@named()
def two_losses_of_one_forward(run: Run) -> Iterator[None]:
    for batch in run.batches:
        loss = run.loss(batch)
        run.engine.backward(loss / 2, retain_graph=True)
        run.engine.backward(loss / 2)
        run.engine.step()
        yield


@named()
def a_backward_without_step(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn != 2:
            run.engine.step()
        yield


@named()
def step_without_backward(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        if turn != 3:
            run.backward(batch)
        run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def step_twice(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.backward(batch)
        run.engine.step()
        run.engine.step()
        yield


@named()
def step_the_optimizer(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn % 2 == 1:
            run.engine.optimizer.step()
        yield


@named()
def step_the_schedule(run: Run) -> Iterator[None]:
    """As a loop of plain torch does; the engine does it as well."""
    for batch in run.batches:
        run.backward(batch)
        run.engine.step()
        run.engine.lr_scheduler.step()
        yield


@named()
def divided_loss(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.engine.backward(run.loss(batch) / 2, scale_wrt_gas=False)
        run.engine.step()
        yield


@named()
def own_backward(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.loss(batch).backward()
        run.engine.step()
        yield


@named()
def scaled_own_backward(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.engine.scale(run.loss(batch)).backward()
        run.engine.step()
        yield


@named()
def own_backward_at_the_boundary_only(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.loss(batch).backward()
        if turn % 2 == 1:
            run.engine.step()
        yield


@named()
def zero_grad_before_each_backward(run: Run) -> Iterator[None]:
    for batch in run.batches:
        loss = run.loss(batch)
        run.engine.zero_grad()
        run.engine.backward(loss)
        run.engine.step()
        yield


@named()
def optimizer_zero_grad_before_each_backward(run: Run) -> Iterator[None]:
    for batch in run.batches:
        loss = run.loss(batch)
        run.engine.optimizer.zero_grad()
        run.engine.backward(loss)
        run.engine.step()
        yield


@named()
def zero_grad_after_each_step_of_the_weights(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        run.engine.step()
        if turn % 2 == 1:
            run.engine.zero_grad()
            run.engine.optimizer.zero_grad()
        yield


@named(gradient_accumulation_steps=1)
def zero_grad_between_two_backwards(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn % 2 == 0:
            run.engine.zero_grad()
        else:
            run.engine.step()
        yield


@named()
def evaluate_between_micro_steps(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.backward(batch)
        run.engine.step()
        run.engine.eval()
        with torch.no_grad():
            run.loss(batch)
        run.engine.train()
        yield


@named(managed_gradient_accumulation=False)
def unmanaged(run: Run) -> Iterator[None]:
    """A step after one, two or three backwards."""
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn in (0, 2, 5, 7):
            run.engine.step()
        yield


@named(managed_gradient_accumulation=False, gradient_accumulation_steps=1)
def unmanaged_without_accumulation(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        if turn in (0, 2, 5, 7):
            run.engine.step()
        yield


@named(managed_gradient_accumulation=False)
def unmanaged_own_backward(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.loss(batch).backward()
        if turn % 2 == 1:
            run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def coalesced(run: Run) -> Iterator[None]:
    """Two backwards, one reduction, one step."""
    batches = iter(run.batches)
    for batch in batches:
        with run.engine.coalesce_grad_reduction():
            run.backward(batch)
            run.backward(next(batches))
        run.engine.step()
        yield


@named()
def coalesced_within_accumulation(run: Run) -> Iterator[None]:
    batches = iter(run.batches)
    for batch in batches:
        with run.engine.coalesce_grad_reduction():
            run.backward(batch)
            run.backward(next(batches))
        run.engine.step()
        yield


@named()
def coalesced_and_declared(run: Run) -> Iterator[None]:
    """As Accelerate would, over one more backward outside."""
    batches = iter(run.batches)
    for batch in batches:
        run.engine.set_gradient_accumulation_boundary(True)
        with run.engine.coalesce_grad_reduction():
            run.backward(batch)
            run.backward(next(batches))
        run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def coalesced_losses_of_a_batch(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.coalesce_grad_reduction():
            run.engine.backward(run.loss(batch) / 2)
            run.engine.backward(run.loss(batch) / 2)
        run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def step_inside_coalesce(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.coalesce_grad_reduction():
            run.backward(batch)
            run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def coalesce_inside_coalesce(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.coalesce_grad_reduction(), run.engine.coalesce_grad_reduction():
            run.backward(batch)
        run.engine.step()
        yield


@named(gradient_accumulation_steps=1)
def coalesce_inside_no_sync(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.no_sync(), run.engine.coalesce_grad_reduction():
            run.backward(batch)
        run.engine.step()
        yield


@named(managed_gradient_accumulation=False)
def coalesce_unmanaged(run: Run) -> Iterator[None]:
    for batch in run.batches:
        with run.engine.coalesce_grad_reduction():
            run.backward(batch)
        run.engine.step()
        yield


@named()
def freeze_on_the_way(run: Run) -> Iterator[None]:
    """Of a layer that has momentum."""
    for turn, batch in enumerate(run.batches):
        if turn == 4:
            run.engine.module[0].requires_grad_(False)
        run.backward(batch)
        run.engine.step()
        yield


@named()
def freeze_and_unfreeze(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        run.engine.module[0].requires_grad_(turn not in (2, 3))
        run.backward(batch)
        run.engine.step()
        yield


@named()
def halve_gradients_by_tensor_hooks(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        if turn == 0:
            for param in run.engine.module.parameters():
                param.register_hook(lambda grad: grad / 2)
        run.backward(batch)
        run.engine.step()
        yield


@named()
def halve_gradients_in_grad(run: Run) -> Iterator[None]:
    for batch in run.batches:
        run.backward(batch)
        for param in run.engine.module.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        run.engine.step()
        yield


@named()
def halve_gradients_by_accumulation_hooks(run: Run) -> Iterator[None]:
    def halve(param: Tensor) -> None:
        param.grad.mul_(0.5)  # type: ignore[union-attr]

    for turn, batch in enumerate(run.batches):
        if turn == 0:
            for param in run.engine.module.parameters():
                param.register_post_accumulate_grad_hook(halve)
        run.backward(batch)
        run.engine.step()
        yield


@named()
def set_lr_on_the_way(run: Run) -> Iterator[None]:
    for turn, batch in enumerate(run.batches):
        for group in run.engine.optimizer.param_groups:
            group["momentum"] = 0.5 + turn / 20
        run.backward(batch)
        run.engine.step()
        yield


@named()
def clamp_weights(run: Run) -> Iterator[None]:
    """Between two steps; where weights are sharded through GatheredParameters."""
    for turn, batch in enumerate(run.batches):
        run.backward(batch)
        run.engine.step()
        if turn % 2 == 1:
            params = list(run.engine.module.parameters())
            with torch.no_grad(), run.gathered(params, modifier_rank=0):
                for param in params:
                    param.clamp_(-0.4, 0.4)
        yield
