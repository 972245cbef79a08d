"""The private names of other libraries that the adapters use: all are listed, and exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from rayzero import huggingface


def test_every_private_attribute_that_is_used_is_listed() -> None:
    folder = Path(huggingface.__file__).parent
    nodes = [it for file in folder.glob("*.py") for it in ast.walk(ast.parse(file.read_text()))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert used == {name for names in huggingface.PRIVATE.values() for name in names}


@pytest.mark.parametrize("kind", huggingface.PRIVATE)
def test_listed_attributes_exist(kind: str) -> None:
    package, _, name = kind.rpartition(".")
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is missing: rayzero[hf]")
    source = inspect.getsource(getattr(import_module(package), name))
    for attribute in huggingface.PRIVATE[kind]:
        assert re.search(rf"\b(self\.|def ){attribute}\b", source), attribute
