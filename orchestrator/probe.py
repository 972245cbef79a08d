"""What the controller lets pass by for whoever counts: too much, or too often, to be a notice."""

from __future__ import annotations

from typing import Protocol

from rayzero.orchestrator.policies.failure import Fault
from rayzero.workers.messages import Heartbeat, Report


class Probe(Protocol):
    """Called in the controller's thread; returns at once, and raises nothing."""

    def reported(self, report: Report) -> None:
        """A rank of the newest generation finished a step. Comes before the step's record."""

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        """A member of the newest generation, on that node, says how far it is."""

    def judged(self, fault: Fault) -> None:
        """A fault goes on record: the root of a repair, or of the job's end."""

    def limited(self, least: int, most: int) -> None:
        """The job may have so many workers from now on."""

    def sends(self, so: bool) -> None:
        """Whether the step that was just finished is to be copied to other nodes, too."""

    def copied(self, step: int, nbytes: int) -> None:
        """A step lies on other nodes: so much of it had to be copied."""


class Unprobed:
    """A probe that counts nothing."""

    def reported(self, report: Report) -> None:
        del report

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        del heartbeat, node

    def judged(self, fault: Fault) -> None:
        del fault

    def limited(self, least: int, most: int) -> None:
        del least, most

    def sends(self, so: bool) -> None:
        del so

    def copied(self, step: int, nbytes: int) -> None:
        del step, nbytes
