from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.vault.support import Town


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    yield town
    town.close()
