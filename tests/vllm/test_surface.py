"""The stand-in has vLLM's documented names and parameters; so has vLLM, where it is installed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT
from tests.vllm import stand_in

SURFACE = tomllib.loads((Path(__file__).parent / "surface.toml").read_text())


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def differences(find: Callable[[str], Any]) -> Iterator[str]:
    """What of the list `find`, which returns a class or function by its name, has otherwise."""
    for kind, names in SURFACE["abstract"].items():
        if sorted(find(kind).__abstractmethods__) != names:
            yield f"{kind}: {sorted(find(kind).__abstractmethods__)}"
    for kind, methods in SURFACE["methods"].items():
        for name, expected in methods.items():
            found = parameters(inspect.getattr_static(find(kind), name).__get__(None, find(kind)))
            if found != expected:
                yield f"{kind}.{name}{found}"
    for kind, expected in SURFACE["fields"].items():
        if (found := [it.name for it in fields(find(kind))]) != expected:
            yield f"{kind}: {found}"
    for name, expected in SURFACE["functions"].items():
        if (found := parameters(find(name))) != expected:
            yield f"{name}{found}"


def test_the_stand_in_has_the_documented_names() -> None:
    assert list(differences(lambda name: getattr(stand_in, name))) == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="rayzero[vllm] is missing")
def test_vllm_has_the_documented_names() -> None:
    homes = "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer"
    homes += ("vllm.model_executor.model_loader.reload", "vllm.entrypoints.llm")

    def find(name: str) -> Any:
        return next(vars(it)[name] for it in map(import_module, homes) if name in vars(it))

    assert list(differences(find)) == []


def test_differences_are_found() -> None:
    other = {"ParamMeta": stand_in.WeightTransferInitInfo}
    found = list(differences(lambda name: other.get(name, getattr(stand_in, name))))
    assert found == ["ParamMeta: []"]


@pytest.fixture
def register() -> Iterator[Callable[[], None]]:
    """The plugin, in a process that has not called it."""
    with stand_in.installed():
        from rayzero import vllm

        vllm.register.cache_clear()
        yield vllm.register
        vllm.register.cache_clear()


def test_the_backend_is_registered_by_the_entry_point(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[], None]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"rayzero": "rayzero.vllm:register"}
    assert project["optional-dependencies"]["vllm"] == ["vllm>=0.28"]
    registry: dict[str, Any] = {}
    monkeypatch.setattr(stand_in.WeightTransferEngineFactory, "_registry", registry)
    register()
    register()  # vLLM may load plugins again in the same process
    assert list(registry) == ["rayzero"]


def test_an_older_vllm_only_gets_a_warning(
    register: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    del sys.modules["vllm.distributed.weight_transfer"].WeightSource
    register()
    assert "needs vllm>=0.28" in caplog.text
