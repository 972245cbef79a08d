"""The position of a function's engines in a step of the job. Pure.

A step of the job ends when each engine that trains has stepped since the previous step of the job.
In a GAN whose discriminator steps before the generator, once or five times, that is after the
generator's `step()`. All ranks make the same calls, so they agree without a collective.

A step of the job begins where the first batch is read, or the first forward is called, after the
previous step ended. The ranks of a new generation meet there: a new rank comes from the function's
start, a survivor from its loop. A survivor whose group breaks within a step runs the rest of the
step without effect: no `step()` changes anything. The survivor meets the other ranks when each
engine has stepped, with or without effect; or when its loop reads again from the loader with which
the step began, because the loop begins there. All engines then go back to the last finished step:
what an engine did in the step before the group broke is undone. A loop that comes to neither place
is given up: see `is_astray`.

If a step begins with a forward, the loop made the batch before, for the steps, the rank and the
number of ranks at that time. The loop continues in another generation only if all these are the
same.

Rule of ordering: `job-step` (docs/engine.md).
"""

from __future__ import annotations

from collections import Counter

from rayzero.engine.session import OTHER_LOADER

_WARNED_STEPS = 100


class JobStep:
    """Follows the calls of one rank. Used by the training thread.

    Attributes:
        engines: the names of the engines that train.
    """

    def __init__(self) -> None:
        self.engines: list[str] = []
        self._has_begun = False
        self._loader: object | None = None  # the loader whose read began the step
        self._stepped: Counter[str] = Counter()  # calls of `step()` in this step, lost or not
        self._usual: Counter[str] = Counter()  # calls in the last step that was not lost
        self._is_lost = False

    def begins(self, loader: object | None, *, within: bool) -> bool:
        """Returns whether a step begins here: see `HostSession.begins_step`. With several engines
        gradients do not matter: they may be those of another engine's loss, as after a
        generator's step."""
        is_own = loader is not None and loader is not OTHER_LOADER
        if len(self.engines) < 2:
            return is_own or not within
        if self._has_begun:
            return is_own and loader is self._loader
        self._has_begun, self._loader = True, loader
        return True

    def completes(self, engine: str) -> bool:
        """Returns whether the step ends with a `step()` of that engine."""
        return all(name == engine or self._stepped[name] for name in self.engines)

    def count(self, engine: str, *, lost: bool) -> bool:
        """Counts a `step()` that has ended; returns whether it ends the step of the job. `lost`: it
        has changed nothing."""
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
        """Whether the step of several engines has begun with a forward: on a batch that the loop
        made before, for the rank and the step at that time."""
        return len(self.engines) > 1 and self._has_begun and self._loader is None

    def begin_again(self) -> None:
        """Called when all engines are back at the beginning of the step, and so is this rank."""
        self._is_lost = False
        self._stepped = Counter()

    def _end(self) -> None:
        self.begin_again()
        self._has_begun, self._loader = False, None

    @property
    def is_astray(self) -> bool:
        """Whether the loop will not come to the end of a lost step: an engine has stepped more
        often than a step needs, as in a loop that counts the finished steps."""
        return self._is_lost and any(
            count > max(1, self._usual[engine]) for engine, count in self._stepped.items()
        )

    @property
    def most_calls(self) -> int:
        """The largest number of calls of one engine's `step()` in this step of the job."""
        return max(self._stepped.values(), default=0)

    def waits_for(self) -> list[str]:
        """Returns the engines that have not stepped while another one stepped 100, 200, 400 ...
        times. Empty at other counts, and if all engines step."""
        hundreds, rest = divmod(self.most_calls, _WARNED_STEPS)
        if rest or not hundreds or hundreds & (hundreds - 1):
            return []
        return [name for name in self.engines if not self._stepped[name]]
