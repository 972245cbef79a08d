"""Tests may be coroutines: each runs in a new event loop, for at most `LIMIT_S`."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from tests.orchestrator.support import finish_jobs

LIMIT_S = 300.0
"""The longest take 10 s, on an idle machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        async with asyncio.timeout(LIMIT_S), finish_jobs():
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True
