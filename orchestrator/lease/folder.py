"""The claims on one job's folder, where they really are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import join, open_store
from rayzero.orchestrator.lease.claim import Claim, Rival, is_gone

FOLDER = "lease"
_NAME = re.compile(r"([0-9a-f]{16})\.json")


class Claims:
    """Reads and writes claims, and remembers when which was seen. All of it may raise StoreError.

    Args:
        archive: the job's folder, a path or a URL.
        now_s: a clock that never goes back.
    """

    def __init__(self, archive: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._url = join(archive, FOLDER)
        self._now_s = now_s
        self._seen: dict[str, tuple[Claim, float, bool]] = {}

    def put(self, claim: Claim) -> None:
        open_store(self._url).replace(f"{claim.id}.json", claim.to_bytes())

    def drop(self, id_: str) -> None:
        open_store(self._url).remove(f"{id_}.json")

    def look(self, mine: str) -> tuple[tuple[Rival, ...], bool]:
        """The claims of others, and whether one's own is there."""
        store = open_store(self._url)
        times = {
            found[1]: one.modified_s
            for one in store.entries()
            if (found := _NAME.fullmatch(one.name))
        }
        now_s = times.get(mine, 0.0)  # by the store's clock, or not known
        rivals = []
        for id_ in sorted(times.keys() - {mine}):
            with suppress(StoreError):  # it was taken back meanwhile
                claim = Claim.parse(store.read(f"{id_}.json"))
                if claim is not None and claim.id == id_:
                    rivals.append(self._rival(claim, max(0.0, now_s - times[id_])))
        return tuple(rivals), mine in times

    def _rival(self, claim: Claim, age_s: float) -> Rival:
        now_s = self._now_s()
        before, since_s, changed = self._seen.get(claim.id, (claim, now_s, False))
        if replace(before, beat=0) != replace(claim, beat=0):
            before, since_s, changed = claim, now_s, False  # it holds by now
        elif before != claim:
            before, since_s, changed = claim, now_s, True
        self._seen[claim.id] = (before, since_s, changed)
        return Rival(claim, is_gone(claim.process), changed, now_s - since_s, age_s)
