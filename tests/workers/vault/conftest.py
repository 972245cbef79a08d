from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.vault.support import VaultCluster


@pytest.fixture
def cluster() -> Iterator[VaultCluster]:
    cluster = VaultCluster()
    yield cluster
    cluster.close()
