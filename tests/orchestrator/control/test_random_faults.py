"""Random courses of the controller in virtual time, of plain jobs and of jobs on rollouts."""

from __future__ import annotations

from tests.orchestrator.control.random_faults import SETTINGS, ControllerStateMachine
from tests.orchestrator.control.random_rollouts import RolloutStateMachine

ControllerStateMachine.TestCase.settings = SETTINGS
RolloutStateMachine.TestCase.settings = SETTINGS
TestControllerStateMachine = ControllerStateMachine.TestCase
TestRolloutStateMachine = RolloutStateMachine.TestCase
