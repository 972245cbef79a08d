"""Every wait, record and release of the product, from its source.

A call counts by its name, so that a new one is included by construction, and so does a method of
such a name that is passed on to be called later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.virtual_device.memory import ROOT

_NAMES = re.compile(
    r"_*(wait(_(?!observer|s\b)\w+)?|sync_compute|synchronize|record(_event)?|release(_\w+)?|result"
    r"|launch_remaining|settle|before_write|query)"
)
FOLDERS = (
    "engine",
    "workers/state_copy.py",
    "workers/mirror.py",
    "workers/vault/mappings.py",
)
# Files and functions that a rank on an accelerator does not run, or that do not order memory.
EXCLUDED = {
    "engine/comm/gloo.py": "CPU ranks",
    "engine/comm/gloo_p2p.py": "CPU ranks",
    "engine/comm/shared_memory.py": "CPU ranks",
    "engine/comm/process_group.py": "a single rank; making groups",
    "engine/checkpoint": "files, after the state was copied to host memory",
    "engine/data": "samples: threads of the loader, before a batch is on the device",
    "engine/config": "no tensors",
    "engine/device.py CudaDevice.record_event": "torch's own calls, which the virtual device has",
    "engine/device.py CudaDevice.synchronize": "torch's own calls, which the virtual device has",
    "engine/device.py CudaDevice._limit": "a health check: no memory of training",
    "engine/planning": "the meta device: no memory",
    "engine/torch_probe.py": "torch alone, beside the engine",
}


@dataclass(frozen=True)
class Wait:
    """A call, or a method that is passed on.

    Attributes:
        file: relative to the project's root.
        function: the outermost one around it, qualified.
    """

    file: str
    function: str
    text: str
    line: int
    column: int

    @property
    def key(self) -> str:
        """Names the call whatever its line is."""
        return f"{self.file} {self.function}: {self.text}"


def all_waits() -> list[Wait]:
    """Every call of such a name in code that a rank on an accelerator runs."""
    roots = [ROOT / folder for folder in FOLDERS]
    return [
        wait
        for root in roots
        for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
        for wait in _waits_in(path)
        if not _excluded(wait)
    ]


def _excluded(wait: Wait) -> bool:
    function = f"{wait.file} {wait.function}"
    return function in EXCLUDED or any(
        wait.file == prefix or wait.file.startswith(f"{prefix}/") for prefix in EXCLUDED
    )


def _waits_in(path: Path) -> Iterator[Wait]:
    file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    for qualified, function in _functions(tree, ""):
        for node in find_waits(function):
            yield Wait(file, qualified, ast.unparse(node), node.lineno, node.col_offset)


def find_waits(function: ast.AST) -> Iterator[ast.expr]:
    """The calls in a function, and methods that it passes on."""
    called = set()
    for node in ast.walk(function):  # a call comes before what it calls
        if isinstance(node, ast.Call):
            called.add(node.func)
            returned = len(node.args) > 1 and _name(node.func) == "release"  # bookkeeping of a pool
            found = (not returned and _NAMES.fullmatch(_name(node.func))) or _joins(node.func)
        else:
            passed_on = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            found = passed_on and node not in called and _NAMES.fullmatch(_name(node))
        if found:
            yield node


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module and its classes, not those within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _joins(function: ast.expr) -> bool:
    """A thread, not a string."""
    return _name(function) == "join" and ast.unparse(function).endswith("thread.join")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
