"""Scripts on workers, without Ray."""

from __future__ import annotations

import pytest

from tests.workers.launch.support import PlainRuns


@pytest.fixture(scope="package")
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(tmp_path_factory.mktemp("plain"))
