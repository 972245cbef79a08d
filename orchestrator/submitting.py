"""From a plan to the process that runs it: a new one, or the one that runs the same job already."""

from __future__ import annotations

import time
from typing import Any

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.differences import LIVE, Difference, beyond, differences, document
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.spec import JobSpec
from rayzero.orchestrator.wishes import Scale

ANSWER_S = 15.0
"""How long a running job may take to answer."""
LEAVE_S = 60.0
"""How long the process of a job that has ended may take to be gone."""
_LOOK_S = 0.05


def begin(plan: JobPlan, can_grow: bool) -> Any:
    """The job's process: of the run that there is, if it is of the same spec, else a new one.

    Raises:
        ConfigError: a job of that name runs, and is another.
        JobFailedError: it does not answer.
    """
    name = plan.spec.name
    until_s = time.monotonic() + LEAVE_S
    while time.monotonic() < until_s:
        actor = reach.find(name)
        try:
            if actor is None:
                return reach.start(plan, can_grow)
            running = reach.call(actor, "spec", timeout_s=ANSWER_S)
            if running is not None:
                _join(actor, running, plan.spec)
                return actor
            reach.call(actor, "fetched", timeout_s=ANSWER_S)
        except ValueError:
            pass  # somebody else was faster: then it is found
        except reach.GoneError:
            pass  # it was on its way out
        except reach.AwayError as away:
            raise JobFailedError(f"job {name!r} is running and silent: {away.seen}") from None
        time.sleep(_LOOK_S)
    raise JobFailedError(f"the last run of job {name!r} does not go away", fix="another name")


def _join(actor: Any, running: JobSpec, wanted: JobSpec) -> None:
    found = differences(document(running), document(wanted))
    if other := beyond(found, LIVE):
        raise ConfigError(
            f"a job called {wanted.name!r} is running, and is not the same:\n{_listed(other)}",
            allowed="the same job, which is then followed; workers.min and max may differ",
            fix=f"`rayzero stop {wanted.name}`, or another name",
        )
    if found:
        reach.call(
            actor,
            "grant",
            Scale(wanted.workers.min, wanted.workers.most),
            timeout_s=ANSWER_S,
        )


def _listed(found: list[Difference]) -> str:
    return "\n".join(f"    {one}" for one in found)
