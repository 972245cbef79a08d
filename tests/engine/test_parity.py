"""Twenty steps of every stage on one, two and three ranks equal a plain torch loop."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import rayzero
from tests.engine import zoo
from tests.support.covering import covering
from tests.support.ranks import run_ranks

STEPS, SAMPLES, CLIP = 20, 18, 0.5
OPTIMIZERS = {"adamw": zoo.adamw, "sgd": zoo.sgd}
Result = tuple[list[float], dict[str, Tensor]]


def train(
    rank: int, world: int, stage: int, precision: str, optimizer: str, micro_steps: int
) -> Result:
    ranks = max(world, 1)
    # Each rank starts from other weights: rank 0's must win.
    model = zoo.make_model(torch.float64 if precision == "fp64" else torch.float32, seed=rank)
    engine, *_ = rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=OPTIMIZERS[optimizer],
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": micro_steps,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
        },
    )
    losses = []
    for batch in zoo.batches(STEPS, SAMPLES):
        for part in batch.chunk(ranks)[rank].chunk(micro_steps):
            loss = engine(part[:, :-1], targets=part[:, 1:])["loss"]
            engine.backward(loss)
            engine.step()
        losses.append(engine.metrics.loss)
    assert engine.metrics.step == STEPS
    return losses, engine.state_dict()


_oracles: dict[tuple[str, str, int], Result] = {}


def oracle(precision: str, optimizer: str, parts: int = 1) -> Result:
    key = precision, optimizer, parts
    if key not in _oracles:
        data = list(zoo.batches(STEPS, SAMPLES))
        model = zoo.make_model(torch.float64 if precision == "fp64" else torch.float32)
        make = OPTIMIZERS[optimizer]
        if precision == "bf16":
            _oracles[key] = zoo.train_mixed_reference(model, make, data, CLIP, parts)
        else:
            _oracles[key] = zoo.train_reference(model, make, data, CLIP)
    return _oracles[key]


TOLERANCES = {
    ("fp64", "adamw"): 1e-9,
    ("fp64", "sgd"): 1e-9,
    ("fp32", "sgd"): 1e-5,
    ("fp32", "adamw"): 1e-3,
    ("bf16", "sgd"): 2e-2,
    ("bf16", "adamw"): 2e-2,
}
PLACES = {"world": (0, 1, 2, 3), "stage": (0, 1, 2, 3), "micro_steps": (1, 3)}
# Everywhere in the precision that sees most; the others where every two choices meet.
CELLS = [("fp64", "adamw", *place) for place in product(*PLACES.values())]
CELLS += [
    (*row["kind"], *(row[name] for name in PLACES))
    for row in covering({"kind": tuple(TOLERANCES)[1:], **PLACES}, 2)
]


@pytest.mark.parametrize(("precision", "optimizer", "world", "stage", "micro_steps"), CELLS)
def test_equals_plain_torch(
    precision: str, optimizer: str, world: int, stage: int, micro_steps: int
) -> None:
    tolerance = TOLERANCES[precision, optimizer]
    results = run_ranks(world, train, stage, precision, optimizer, micro_steps)
    same_parts = precision == "bf16" and optimizer == "adamw"
    right_losses, right = oracle(
        precision, optimizer, max(world, 1) * micro_steps if same_parts else 1
    )
    for losses, state in results:
        assert losses == pytest.approx(right_losses, rel=tolerance)
        if state:
            assert state.keys() == right.keys()
            distance = zoo.relative_l2_error if precision == "bf16" else zoo.relative_error
            worst = {name: distance(state[name], right[name]) for name in right}
            assert max(worst.values()) <= tolerance, worst
            assert state["head.weight"] is state["embed.weight"]
    assert [bool(state) for _, state in results] == [True] + [False] * (len(results) - 1)
    assert right_losses[-1] < right_losses[0] * 0.98  # it did learn


def test_the_oracle_is_sharp() -> None:
    """What the tolerance is worth: a learning rate off by 1e-7 is seen in float64."""
    data = list(zoo.batches(STEPS, SAMPLES))
    model = zoo.make_model(torch.float64)

    def slightly_faster(groups: list[dict]) -> torch.optim.Optimizer:
        groups[1]["lr"] *= 1 + 1e-7
        return zoo.adamw(groups)

    _, wrong = zoo.train_reference(model, slightly_faster, data, CLIP)
    _, right = oracle("fp64", "adamw")
    assert max(zoo.relative_error(wrong[name], right[name]) for name in right) > 1e-9
