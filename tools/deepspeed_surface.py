"""Writes `deepspeed_surface.json`: DeepSpeed's modules, names of its engine and accelerator, what
its packages export, its constants, and all names below `deepspeed` that transformers, accelerate,
trl, peft and lightning use.

Run where those and DeepSpeed 0.19 are installed, which the project does not need:
`python -m tools.deepspeed_surface`. The sources are read, not imported.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("deepspeed_surface.json")
PACKAGES = (
    "",
    "checkpoint",
    "linear",
    "module_inject",
    "ops",
    "ops.adagrad",
    "ops.adam",
    "ops.lamb",
    "ops.lion",
    "ops.transformer",
    "pipe",
    "runtime.zero",
    "sequence",
    "utils",
)
MODULES = ("comm.comm", "moe.layer", "moe.utils", "runtime.config_utils", "runtime.lr_schedules")
LIBRARIES = ("transformers", "accelerate", "trl", "peft", "lightning")

_UNUSED = re.compile(r"inference|module_inject|model_implementations|ops\.\w+\.|.*\btest\b")


def package_folder(name: str) -> Path:
    """Where an installed package's sources are."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed")
    return Path(spec.origin).parent


def class_names(path: Path, name: str) -> list[str]:
    """Public methods of a class, and the attributes that it sets on itself."""
    tree = ast.parse(path.read_text())
    (found,) = (it for it in ast.walk(tree) if isinstance(it, ast.ClassDef) and it.name == name)
    methods = {it.name for it in found.body if isinstance(it, ast.FunctionDef)}
    attributes = {
        it.attr
        for it in ast.walk(found)
        if isinstance(it, ast.Attribute)
        and isinstance(it.ctx, ast.Store)
        and isinstance(it.value, ast.Name)
        and it.value.id == "self"
    }
    return sorted(it for it in methods | attributes if not it.startswith("_"))


def names_used(path: Path) -> Iterator[str]:
    """Dotted names below `deepspeed` that a file imports, or writes out."""
    text = path.read_text(errors="replace")
    if "deepspeed" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.partition(".")[0] == "deepspeed":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (it.name for it in node.names if it.name.startswith("deepspeed."))
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            dotted = ast.unparse(node)
            if dotted.startswith("deepspeed.") and dotted.replace(".", "").isidentifier():
                yield dotted


def exported(deepspeed: Path) -> Iterator[str]:
    """Public names that DeepSpeed's packages re-export, and that some of its modules define."""
    for package in PACKAGES:
        path = deepspeed.joinpath(*filter(None, package.split(".")), "__init__.py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or "deepspeed" in str(node.module)):
                for alias in node.names:
                    yield ".".join(filter(None, (package, alias.asname or alias.name)))
    for module in MODULES:
        tree = ast.parse(deepspeed.joinpath(*module.split(".")).with_suffix(".py").read_text())
        for item in tree.body:
            if isinstance(item, ast.FunctionDef | ast.ClassDef):
                yield f"{module}.{item.name}"


def modules(deepspeed: Path) -> list[str]:
    """DeepSpeed's modules that are not inference's, a kernel's or a test."""
    paths = (path.relative_to(deepspeed).with_suffix("") for path in deepspeed.rglob("*.py"))
    names = {".".join(part for part in path.parts if part != "__init__") for path in paths}
    return sorted(name for name in names if name and not _UNUSED.match(name))


def constants(path: Path) -> dict[str, Any]:
    """Names and values of a module of constants, without its texts on how to write a config."""
    tree = ast.parse(path.read_text())
    tree.body = [it for it in tree.body if isinstance(it, ast.Assign | ast.ClassDef)]
    values: dict[str, Any] = {}
    exec(compile(tree, path, "exec"), values)
    return {
        name: value
        for name, value in values.items()
        if name.isupper() and not name.endswith("_FORMAT")
    }


def main() -> None:
    deepspeed = package_folder("deepspeed")
    public = (f"deepspeed.{it}" for it in exported(deepspeed) if "*" not in it and "._" not in it)
    used = {
        name
        for library in LIBRARIES
        for path in package_folder(library).rglob("*.py")
        for name in names_used(path)
    }
    surface = {
        "engine": class_names(deepspeed / "runtime/engine.py", "DeepSpeedEngine"),
        "accelerator": class_names(
            deepspeed / "accelerator/abstract_accelerator.py", "DeepSpeedAccelerator"
        ),
        "constants": constants(deepspeed / "runtime/constants.py"),
        "modules": modules(deepspeed),
        "exported": sorted(set(public)),
        "used": sorted(used),
    }
    FILE.write_text(json.dumps(surface, indent=1) + "\n")


if __name__ == "__main__":
    main()
