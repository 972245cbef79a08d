from __future__ import annotations

import pytest

from rayzero.engine.checkpoint.errors import CheckpointMismatchError, check_state_fits_model
from rayzero.engine.layout.state_index import LogicalTensor

MODEL = {f"weights/{name}": LogicalTensor("F32", (2, 3)) for name in "abcdef"}


def test_dtypes_may_differ():
    check_state_fits_model(MODEL, {name: LogicalTensor("BF16", (2, 3)) for name in MODEL})


def test_mismatches_are_listed_with_counts():
    state = {
        "weights/a": LogicalTensor("F32", (3, 2)),
        "weights/x": LogicalTensor("F32", (1,)),
        "weights/b": LogicalTensor("F32", (2, 3)),
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        check_state_fits_model(MODEL, state)
    text = str(caught.value)
    assert "4 tensors of the model are not in it: weights/c, weights/d, weights/e, ..." in text
    assert "1 of its tensors are not in the model: weights/x" in text
    assert "weights/a is [3, 2] in the state and [2, 3] in the model" in text
    assert "weights/b" not in text
