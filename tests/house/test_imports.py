"""What modules may import and call, by table; import contracts; the cost of importing rayzero."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.source import (
    PACKAGES,
    ROOT,
    Module,
    import_graph,
    imported_names,
    packages,
    parse,
    scripts,
    suite,
    used_names,
)

COLLECTIVES = tuple(
    (
        "all_gather all_reduce all_to_all batch_isend_irecv broadcast gather irecv isend recv "
        "reduce scatter send"
    ).split()
)
MAX_IMPORT_S = 0.2
_RAY = """
orchestrator.cluster.actor_pool orchestrator.cluster.connect orchestrator.cluster.job_submission
orchestrator.cluster.head_calls orchestrator.cluster.leftovers
orchestrator.cluster.ray_api orchestrator.cluster.vault_group orchestrator.cluster.worker_group
orchestrator.job.actor orchestrator.job.api orchestrator.job.client orchestrator.job.command_server
orchestrator.job.ended_jobs workers.actor workers.lifetimes workers.prestop
workers.vault.actor
"""
RAY_MODULES = ["rayzero.data.ray_blocks", *(f"rayzero.{name}" for name in _RAY.split())]


def used(matches: Callable[[str], bool]) -> Callable[[Module], list[str]]:
    """A check that finds uses of some imported names."""
    return lambda module: [f"{line} {name}" for line, name in used_names(module) if matches(name)]


def found(matches: Callable[[ast.AST], object]) -> Callable[[Module], list[str]]:
    """A check that finds some nodes of a syntax tree."""
    return lambda module: [
        f"{getattr(node, 'lineno', 0)}" for node in ast.walk(module.tree) if matches(node)
    ]


def is_collective(name: str) -> bool:
    return name.startswith("torch.distributed.") and name.split(".")[-1].startswith(COLLECTIVES)


def is_device_call(name: str) -> bool:
    return name.startswith(("torch.cuda", "torch.accelerator"))


def is_blocking_read(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("item", "tolist", "cpu")
        and not node.args
    )


def compares_device_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(
        isinstance(part, ast.Constant) and part.value in ("cuda", "nccl")
        for part in (node.left, *node.comparators)
    )


def has_literal_timeout(node: ast.AST) -> bool:
    """A limit in a call that is a number, and not a constant whose reason is stated."""
    return isinstance(node, ast.Call) and any(
        keyword.arg in ("timeout", "timeout_s", "limit_s")
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, int | float)
        for keyword in node.keywords
    )


def is_noun_as_fix(node: ast.AST) -> bool:
    """What an error says to do about it begins with a verb, a setting or a command."""
    articles = ("a ", "an ", "the ", "another ", "that ", "one ", "no ", "nothing ", "other ")
    return (
        isinstance(node, ast.keyword)
        and node.arg == "fix"
        and any(
            isinstance(part, ast.Constant) and str(part.value).startswith(articles)
            for part in list(ast.walk(node.value))[:2]
        )
    )


TORCH_PRIVATE = (
    "_C _dynamo _distributed_c10d _world _functorch _execution_engine _disable_current_modes "
    "_abort_process_group _orig_mod _compiled_call_impl"
).split()
PATCHED_LIBRARIES = ("torch", "accelerate", "transformers", "atexit")


def is_private_api(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    names += [node.attr] if isinstance(node, ast.Attribute) else []
    return not {*names}.isdisjoint(TORCH_PRIVATE)


def patches_a_library(module: Module) -> list[str]:
    """Assignments to attributes of what a library's import has given."""
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        and (getattr(node, "module", None) or node.names[0].name).startswith(PATCHED_LIBRARIES)
        for alias in node.names
    }
    assigned = [it for it in ast.walk(module.tree) if isinstance(it, ast.Assign)]
    lines = []
    for node in assigned:
        for target in node.targets:
            root: ast.AST = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in names:
                lines.append(f"{node.lineno}")
    return lines


# {what modules do: (how it is found, {which may: why}, sources that do it, one that does not)}
RULES: dict[str, tuple[Callable[[Module], list[str]], dict[str, str], tuple[str, ...], str]] = {
    "import ray": (
        used(lambda name: name.split(".")[0] == "ray"),
        dict.fromkeys(RAY_MODULES, "all others can be tested without it"),
        ("import ray", "def f():\n from ray.util import x"),
        "import rayzero",
    ),
    "call collectives": (
        used(is_collective),
        {
            "rayzero.engine.comm.process_group": "where there is no engine yet",
            **dict.fromkeys(
                (f"rayzero.engine.comm.{x}" for x in ("gloo", "gloo_p2p", "nccl", "shared_memory")),
                "collectives.py counts their calls",
            ),
        },
        (
            "import torch.distributed as d\nd.isend(t)",
            "import torch\ntorch.distributed.all_reduce(t)",
            "from torch import distributed\ndistributed.reduce_scatter_single",
            "from torch.distributed import broadcast",
        ),
        "import torch\ntorch.gather(t)\nsend(t)",
    ),
    "use devices": (
        used(is_device_call),
        {
            "rayzero.engine.device": "the seam",
            "rayzero.deepspeed.accelerator": "torch.cuda under DeepSpeed's names",
        },
        (
            "import torch\ntorch.cuda.synchronize()",
            "import torch\ntorch.accelerator.synchronize()",
            "from torch.cuda import Stream",
        ),
        "from torch import Tensor\nx.cuda_graph",
    ),
    "read tensors by methods of torch, which block": (
        found(is_blocking_read),
        {
            "rayzero.engine.device": "Device.read itself, of host memory",
            "rayzero.engine.comm.collectives": "sums that Device.to_host has copied",
            "rayzero.engine.comm.gloo_p2p": "gloo's tensors are in host memory",
            "rayzero.engine.comm.shared_memory": "tensors of locations are in host memory",
            "rayzero.engine.checkpoint.imports.deepspeed": "files are loaded to host memory",
            "rayzero.engine.checkpoint_io": "a model for export, outside steps",
            "rayzero.engine.data.sample_source": "indices are in host memory",
            "rayzero.engine.data.sample_ledger": "indices are in host memory",
            "rayzero.engine.data.streams.iterable_source": "numpy's integers",
            "rayzero.engine.data.streams.mixture": "numpy's integers",
            "rayzero.engine.data.streams.packing": "numpy's integers",
            "rayzero.engine.data.streams.rows": "numpy's integers",
            "rayzero.engine.data.streams.source": "numpy's integers",
            "rayzero.data.hugging_face": "numpy's integers",
            "rayzero.engine.optim.optimizers": "LAMB counts its steps in host memory",
            "rayzero.engine.state.client_state": "the script's tensors in a checkpoint",
            "rayzero.engine.state.metadata": "words of a random state in host memory",
            "rayzero.engine.state.save": "a full state_dict, outside steps",
            "rayzero.deepspeed.zero_to_fp32": "a model for export, outside steps",
            "rayzero.workers.function_result": "a result of the user's function",
        },
        ("loss.item()", "f(x).cpu()"),
        "device.read(loss)\nx.cpu",
    ),
    "compare names of devices and backends": (
        found(compares_device_name),
        {
            "rayzero.engine.comm.process_group": "a group's backend may be the script's choice",
            "rayzero.engine.comm.gloo_p2p": "a group that only a GPU can leave stays at exit",
            "rayzero.engine.state.metadata": "a key of saved states",
            "rayzero.workers.process_group": "NCCL's settings; a group that the driver must end",
            "rayzero.deepspeed.accelerator": "DeepSpeed's names of devices",
        },
        ("device.type == 'cuda'", "'nccl' in name"),
        "backend = 'nccl'",
    ),
    "use torch's private API": (
        found(is_private_api),
        {"rayzero.engine.torch_private": "`test_torch_private.py` tests each use"},
        ("import torch\ntorch._C.x", "from torch.distributed.distributed_c10d import _world"),
        "import torch\ntorch.compile",
    ),
    "patch a library": (
        patches_a_library,
        {},
        ("import torch\ntorch.ones = f", "from torch import nn as n\nn.Linear.forward = f"),
        "import torch\nx.torch = y.torch = torch.ones",
    ),
    "have assertions, which `python -O` removes": (
        found(lambda node: isinstance(node, ast.Assert)),
        {},
        ("def f(): assert 1",),
        "pytest.raises",
    ),
    "have a time limit that is a number in a call": (
        found(has_literal_timeout),
        {},
        ("run(timeout=3)", "wait(limit_s=0.5)"),
        "run(timeout=LIMIT_S, count=3)",
    ),
    "fix errors by a noun": (
        found(is_noun_as_fix),
        {},
        ("f(fix='the name')", "f(fix=f'another {x}')"),
        "f(fix='set x')",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_only_these_modules(rule: str) -> None:
    check, allowed, bad, good = RULES[rule]
    does = {module.name: lines for module in packages() if (lines := check(module))}
    assert {name: lines for name, lines in does.items() if name not in allowed} == {}
    assert [name for name in allowed if name not in does] == [], "an exception that is not needed"
    assert all(check(parse("m", text)) for text in bad)
    assert not check(parse("m", good))


def relative_or_bare_imports(module: Module) -> list[str]:
    """`import engine` works in the checkout's folder only."""
    return [
        f"{module.name}:{line} {name}"
        for line, name in imported_names(module)
        if name.startswith(".") or name.split(".")[0] in PACKAGES
    ]


def test_imports_are_absolute() -> None:
    everything = [*packages(), *scripts(), *suite()]
    assert [wrong for module in everything for wrong in relative_or_bare_imports(module)] == []
    for text in ("from . import x", "def f():\n from .x import y", "import engine.errors"):
        assert relative_or_bare_imports(parse("m", text))


def test_tests_share_code_by_support_modules_only() -> None:
    """No test module imports another; benchmarks are imported by the tests of benchmarks."""
    wrong = [
        f"{module.name}:{line} {name}"
        for module in suite()
        for line, name in imported_names(module)
        if (
            any(part.startswith("test_") for part in name.split(".")[:-1])
            and name.rpartition(".")[0] != module.name
        )
        or (name.startswith("benchmarks.") and not module.name.startswith("tests.benchmarks."))
    ]
    assert wrong == []


def upward_imports(modules: list[Module]) -> list[str]:
    """Imports of a higher layer, for type checkers too, which the layers contract ignores."""
    levels = {f"rayzero.{package}": number for number, package in enumerate(PACKAGES)}

    def level(name: str) -> int | None:
        return levels.get(".".join(name.split(".")[:2]))

    return [
        f"{name} imports {target}"
        for name, targets in import_graph(modules).items()
        for target in targets
        if (own := level(name)) is not None and (level(target) or 0) > own
    ]


def test_type_only_imports_respect_layers() -> None:
    assert upward_imports(packages()) == []
    text = "if TYPE_CHECKING:\n from rayzero.workers import x"
    low, high = parse("rayzero.engine.a", text), parse("rayzero.workers", "x = 1")
    assert upward_imports([low, high]) == ["rayzero.engine.a imports rayzero.workers"]


def test_contracts_find_what_breaks_them(tmp_path: Path) -> None:
    """`make lint` runs import-linter on the checkout; here it is run on a copy that breaks each
    contract of pyproject.toml."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("rayzero", *PACKAGES):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    engine = "import rayzero.workers\nimport ray\nimport rayzero.deepspeed\nimport torch\n"
    (tmp_path / "engine/x.py").write_text(engine)
    (tmp_path / "workers/x.py").write_text("import rayzero.orchestrator\n")
    (tmp_path / "orchestrator/x.py").write_text("from rayzero.engine import x\n")
    command = "from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "0 kept, 4 broken" in done.stdout, done.stdout
    for broken in ("engine.x -> rayzero.workers", "workers.x -> rayzero.orchestrator"):
        assert f"rayzero.{broken}" in done.stdout


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("package", "without"), [("orchestrator", "torch"), ("engine", "ray")])
def test_package_imports_without_dependency(package: str, without: str) -> None:
    """Every module of a package, in a new process in which another package is missing."""
    names = [m.name for m in packages() if m.name.startswith(f"rayzero.{package}")]
    run_python(
        f"import importlib, sys\nsys.modules[{without!r}] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )


def cpu_s(*arguments: str) -> float:
    """Minimum CPU time of several Python processes; other load on the machine only adds to it."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, timeout=300
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("arguments", "library"),
    [(["-c", "import rayzero"], "pass"), (["-m", "rayzero", "--help"], "import typer.rich_utils")],
)
def test_import_and_help_are_fast(arguments: list[str], library: str) -> None:
    """Without the library that prints the help, which takes two thirds of it on any machine."""
    assert cpu_s(*arguments) - cpu_s("-c", library) < MAX_IMPORT_S


def test_import_and_help_load_neither_torch_nor_ray() -> None:
    output = run_python(
        "import sys, rayzero, rayzero.__main__ as cli\n"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "sys.argv = ['rayzero', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    loaded |= {end.code} - {0, None}\n"
        "loaded |= heavy & set(sys.modules)\n"
        "sys.exit(repr(loaded) if loaded else 0)\n"
    )
    assert "Usage" in output
