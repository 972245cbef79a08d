"""Scripts that train several engines, as if they ran once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.workers.launch.support import PlainRuns, make_workers, read_notes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("step", "place"), [(3, "between"), (4, "generator"), (5, "between"), (8, "critic")]
)
def test_script_of_two_engines_goes_on_where_it_is(
    plain_runs: PlainRuns, tmp_path: Path, step: int, place: str
) -> None:
    """Also in the last step of an epoch, whose batch is yielded again before the next begins."""
    undisturbed = plain_runs("gan.py")
    args = ("--out", str(tmp_path), "--kill", str(step), place)
    with closing(make_workers(tmp_path, "gan.py", *args, count=3)) as local:
        local.form(1, [0, 1])
        assert local.wait_lost(120) == 1
        local.fence(1, [0])
        local.finish(2, [0, 2], local.slots(1, 2))
    assert (tmp_path / "killed").exists()
    expected = read_notes(undisturbed, "weights", 0)
    found = read_notes(tmp_path, "weights", 0)
    assert [_flat(it) for it in found] == [pytest.approx(_flat(it), rel=1e-9) for it in expected]
    assert [len(read_notes(tmp_path, "entries", rank)) for rank in (0, 1)] == [1, 2]


def _flat(value: object) -> list[float]:
    return [it for part in value for it in _flat(part)] if isinstance(value, list) else [value]
