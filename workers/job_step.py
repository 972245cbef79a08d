"""Where a function's engines are in a step of the job. Pure.

A step of the job ends when each engine that trains has stepped since the last one ended: after the
generator's `step()`, where the discriminator's comes before it, once or five times. All ranks make
the same calls, so they agree without a collective.

It begins where the first batch is read, or the first forward is called, after the last one ended.
There the ranks of a new generation meet: a new one comes from the function's start, a survivor from
its loop. A survivor whose group breaks within a step does the rest of it for nothing: no `step()`
changes anything. It meets the others where each engine has stepped, for nothing or not; or where it
reads again from the loader with which the step began, because that is where its loop begins. What
an engine has done in the step before the group broke is undone there: all go back to the last
finished step. A loop that comes to neither place is not followed: see `is_astray`.

Where it begins with a forward, the loop has made the batch before: for the engines' steps, the rank
and the number of ranks that it knew. It continues only if all of these are the same.

Rule of ordering: `job-step` (docs/engine.md).
"""

from __future__ import annotations

from collections import Counter

from rayzero.engine.session import OTHER_LOADER

_WARNED_STEPS = 100


class JobStep:
    """Follows the calls of one rank. Used by the training thread.

    Attributes:
        engines: the names of those that train.
    """

    def __init__(self) -> None:
        self.engines: list[str] = []
        self._has_begun = False
        self._loader: object | None = None  # with whose read it has begun
        self._stepped: Counter[str] = Counter()  # calls since the last end, counted or lost
        self._usual: Counter[str] = Counter()  # of the last step that was not lost
        self._is_lost = False

    def begins(self, loader: object | None, *, within: bool) -> bool:
        """Whether the step begins here: see `HostSession.begins_step`. The gradients may be those
        of another engine's loss, as after a generator's step."""
        is_own = loader is not None and loader is not OTHER_LOADER
        if len(self.engines) < 2:
            return is_own or not within
        if self._has_begun:
            return is_own and loader is self._loader
        self._has_begun, self._loader = True, loader
        return True

    def completes(self, engine: str) -> bool:
        """Whether the step ends with a `step()` of that engine."""
        return all(it == engine or self._stepped[it] for it in self.engines)

    def count(self, engine: str, *, lost: bool) -> bool:
        """A `step()` has ended; whether that ends the step. `lost`: it has changed nothing."""
        self._stepped[engine] += 1
        self._is_lost = self._is_lost or lost
        if not self.completes(engine):
            return False
        if not self._is_lost:
            self._usual = self._stepped
        self._end()
        return True

    @property
    def begins_in_forward(self) -> bool:
        """Whether several engines' step begins with a batch that the loop has made before, for the
        rank and the step that it knew."""
        return len(self.engines) > 1 and self._has_begun and self._loader is None

    def begin_again(self) -> None:
        """All engines are at the beginning of the step, where this rank is, too."""
        self._is_lost = False
        self._stepped = Counter()

    def _end(self) -> None:
        self.begin_again()
        self._has_begun, self._loader = False, None

    @property
    def is_astray(self) -> bool:
        """Whether the loop will not come to the end of a lost step: one engine has stepped more
        often than it takes, as where the loop counts the steps that are finished."""
        return self._is_lost and any(
            count > max(1, self._usual[engine]) for engine, count in self._stepped.items()
        )

    @property
    def most_calls(self) -> int:
        """The largest number of calls of one engine since the last end."""
        return max(self._stepped.values(), default=0)

    def waits_for(self) -> list[str]:
        """The engines that have not stepped while the others did 100, 200, 400 ... times; empty
        between these, and where all step."""
        hundreds, rest = divmod(self.most_calls, _WARNED_STEPS)
        if rest or not hundreds or hundreds & (hundreds - 1):
            return []
        return [it for it in self.engines if not self._stepped[it]]
