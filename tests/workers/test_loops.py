"""Training loops of random shape in jobs whose workers are killed: weights and ledger are those of
a plain torch loop. Real processes and a vault, without Ray."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayzero.engine.data.sample_ledger import check_ledger, read_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import Crashed
from tests.engine.data.loops import (
    SAMPLES,
    Shape,
    engine_config,
    expected_samples,
    plain_weights,
    shapes,
)
from tests.workers.local_controller import LocalController
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import mirrored_setup

EXAMPLES = int(os.environ.get("RAYZERO_KILLED_LOOP_EXAMPLES", "6"))
PHASES = ["forward", "backward", "reduce", "update", "publish", "mirror"]

kills = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from(PHASES)),
    min_size=1,
    max_size=2,
    unique_by=lambda kill: kill[0],
)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes(), kills)
def test_random_loops_with_kills(shape: Shape, kills: list[tuple[int, int, str]]) -> None:
    """A step that a rank is killed in is done again by the others, at any place of the loop."""
    shape = replace(shape, mistakes=())
    with TemporaryDirectory() as folder:
        steps = expected_samples(shape)
        faults = tuple(
            f'kill(rank={rank}, step={1 + turn % len(steps)}, phase="{phase}")'
            for rank, turn, phase in kills
        )
        controller, errors = run_job(Path(folder), shape, faults)
        if errors:
            assert shape.may_fail, errors
            return
        assert controller.wrong == []
        assert FaultRecord(folder).read()  # the second one's rank may no longer be there
        assert check_ledger(f"{folder}/ledger", SampleOrder(SAMPLES, 0), shape.batch) == []
        ledger = read_ledger(f"{folder}/ledger")
        assert [sorted(samples) for samples in ledger.values()] == [sorted(it) for it in steps]
        weights = torch.load(f"{folder}/weights.pt", weights_only=True)
        torch.testing.assert_close(weights, plain_weights(steps))


def run_job(
    folder: Path, shape: Shape, faults: tuple[str, ...]
) -> tuple[LocalController, list[str]]:
    """The job's controller, and the errors of the function."""
    setup = mirrored_setup(
        folder,
        "tests.engine.data.loops:train_job",
        args=asdict(shape),
        engine_config=engine_config(shape),
        faults=faults,
        seed=0,
        steps=len(expected_samples(shape)),
    )
    local = LocalWorkers(setup, 3)
    try:
        controller = LocalController(local)
        controller.run(240)
        crashes = [
            message.error
            for messages in local.seen.values()
            for message in messages
            if isinstance(message, Crashed) and message.kind == "user"
        ]
    finally:
        local.close()
    return controller, crashes
