"""The hooks of adapters: what is called when a library is imported, and what a patch changes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from rayzero.engine import patches
from rayzero.engine.patches import Patch, declare
from rayzero.engine.session import use_session
from rayzero.workers.launch import adapters
from rayzero.workers.launch.adapters import install_adapters, on_import, wrap
from tests.workers.support import session

CALLS: list[str] = []


def install() -> None:
    CALLS.append("install")
    declare(Patch("library_of_test.double", "the test", "until the process ends"))
    on_import("library_of_test", lambda module: CALLS.append(f"imported {module.__name__}"))
    on_import("library_of_test", lambda module: wrap(module, "double", _around))


def _around(job, original, value: int) -> int:
    return original(value) + 1


def test_adapter_follows_the_import_of_a_library_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_installed", set())
    monkeypatch.setattr(adapters, "_patches", {})
    monkeypatch.setattr(patches, "_declared", [*patches.PATCHES])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "library_of_test.py").write_text("def double(value):\n    return 2 * value\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        install_adapters([f"{__name__}:install"])
    assert CALLS == ["install"]
    library: ModuleType = import_module("library_of_test")
    assert CALLS == ["install", "imported library_of_test"]
    on_import("library_of_test", lambda module: CALLS.append("imported before"))
    assert CALLS[2:] == ["imported before"]
    assert library.double(4) == 8, "without a job nothing changes"
    with use_session(session()[0]):
        assert library.double(4) == 9
    del sys.modules["library_of_test"]
