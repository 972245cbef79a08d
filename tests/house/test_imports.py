"""Rules for imports between packages, and the cost of importing rayzero."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.house.source import (
    PACKAGES,
    ROOT,
    Module,
    imported_names,
    packages,
    parse,
    scripts,
    suite,
    used_names,
)

# The only modules that import Ray; all others can be tested without it.
RAY_MODULES = {
    "rayzero.orchestrator.cluster.ray_api",
    "rayzero.orchestrator.job.api",
    "rayzero.orchestrator.cluster.connect",
    "rayzero.orchestrator.job.actor",
    "rayzero.orchestrator.job.client",
    "rayzero.orchestrator.job.command_server",
    "rayzero.orchestrator.job.ended_jobs",
    "rayzero.orchestrator.cluster.job_submission",
    "rayzero.orchestrator.cluster.actor_pool",
    "rayzero.orchestrator.cluster.vault_group",
    "rayzero.orchestrator.cluster.worker_group",
    "rayzero.workers.actor",
    "rayzero.workers.prestop",
    "rayzero.workers.vault.actor",
}
# The only modules that call collectives; engine/comm/collectives.py counts their calls.
COLLECTIVE_MODULES = {
    "rayzero.engine.comm.gloo",
    "rayzero.engine.comm.gloo_p2p",
    "rayzero.engine.comm.nccl",
    "rayzero.engine.comm.process_group",  # where there is no engine yet
    "rayzero.engine.comm.shared_memory",
}
COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "batch_isend_irecv", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "scatter", "send"),
)
MAX_IMPORT_S = 0.2


def imports_package(module: Module, package: str) -> bool:
    return any(name.split(".")[0] == package for _, name in imported_names(module))


def collective_calls(module: Module) -> list[str]:
    return [
        f"{module.name}:{line} {name}"
        for line, name in used_names(module)
        if name.startswith("torch.distributed.") and name.split(".")[-1].startswith(COLLECTIVES)
    ]


def relative_imports(module: Module) -> list[str]:
    names = imported_names(module)
    return [f"{module.name}:{line}" for line, name in names if name.startswith(".")]


def bare_imports(module: Module) -> list[str]:
    """Imports such as `import engine`, which only work in the checkout's folder."""
    names = imported_names(module)
    return [f"{module.name}:{line}" for line, name in names if name.split(".")[0] in PACKAGES]


def asserts(module: Module) -> list[str]:
    """`python -O` removes assertions: errors must be raised."""
    nodes = ast.walk(module.tree)
    return [f"{module.name}:{node.lineno}" for node in nodes if isinstance(node, ast.Assert)]


def upward_imports(graph: grimp.ImportGraph) -> list[str]:
    """Imports of a higher layer, including type-only imports, which the layers contract ignores."""
    levels = {f"rayzero.{package}": number for number, package in enumerate(PACKAGES)}

    def level(name: str) -> int | None:
        return levels.get(".".join(name.split(".")[:2]))

    return [
        f"{module} imports {target}"
        for module in graph.modules
        for target in graph.find_modules_directly_imported_by(module)
        if (module_level := level(module)) is not None
        and (target_level := level(target)) is not None
        and target_level > module_level
    ]


def find_cycle(graph: grimp.ImportGraph) -> list[str]:
    """A cycle of imports, including imports inside functions; empty if there is none."""
    edges = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def runtime_graph() -> grimp.ImportGraph:
    return grimp.build_graph("rayzero", exclude_type_checking_imports=True, cache_dir=None)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the contracts of pyproject.toml on the checkout or a copy."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=300
    )


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


def test_import_contracts() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("engine/x.py", "import rayzero.workers", "imports run one way"),
        ("workers/x.py", "import rayzero.orchestrator", "imports run one way"),
        ("engine/x.py", "import ray", "the engine has no ray"),
        ("engine/x.py", "import rayzero.deepspeed", "no adapters"),
        ("orchestrator/x.py", "from rayzero.engine import x", "no torch, even indirectly"),
    ],
)
def test_import_linter_detects_broken_contract(
    path: str, line: str, contract: str, tmp_path: Path
) -> None:
    """In a copy with symbolic links, in which `engine/x.py` legitimately imports torch at first."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("rayzero", *PACKAGES):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, symlinks=True, ignore=lambda *_: ["__pycache__"]
        )
    (tmp_path / "engine/x.py").write_text("import torch\n")
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / path).write_text(line + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert any(contract in row and "BROKEN" in row for row in done.stdout.splitlines()), done.stdout


def test_graph_contains_every_module(runtime_graph: grimp.ImportGraph) -> None:
    assert {module.name for module in packages()} == runtime_graph.modules


def test_no_import_cycle(runtime_graph: grimp.ImportGraph) -> None:
    assert find_cycle(runtime_graph) == []
    graph = runtime_graph
    graph.add_import(importer="rayzero.engine.errors", imported="rayzero.engine.session")
    graph.add_import(importer="rayzero.engine.session", imported="rayzero.engine.errors")
    assert len(find_cycle(graph)) == 3


def test_type_only_imports_respect_layers() -> None:
    graph = grimp.build_graph("rayzero", cache_dir=None)
    assert upward_imports(graph) == []
    graph.add_import(importer="rayzero.engine.errors", imported="rayzero.workers")
    assert upward_imports(graph) == ["rayzero.engine.errors imports rayzero.workers"]


def test_only_ray_modules_import_ray() -> None:
    assert {module.name for module in packages() if imports_package(module, "ray")} == RAY_MODULES


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (relative_imports, "from . import errors", "from rayzero.engine import errors"),
        (relative_imports, "def f():\n from .errors import E", "import rayzero.engine.errors"),
        (bare_imports, "import engine.errors", "import rayzero.engine.errors"),
        (bare_imports, "from workers import actor", "from rayzero.workers import actor"),
        (asserts, "def f(): assert 1", "def f(): pytest.raises"),
        (collective_calls, "import torch.distributed as d\nd.isend(t)", "send(t)"),
        (collective_calls, "import torch\ntorch.distributed.all_reduce(t)", "torch.gather(t)"),
        (collective_calls, "from torch import distributed\ndistributed.reduce_scatter_single", "1"),
        (collective_calls, "from torch.distributed import broadcast", "import torch.distributed"),
    ],
)
def test_check_detects_violation(check: Callable[[Module], list[str]], bad: str, good: str) -> None:
    assert len(check(parse("m", bad))) == 1
    assert check(parse("m", good)) == []


def test_only_collective_modules_call_collectives() -> None:
    callers = {module.name: calls for module in packages() if (calls := collective_calls(module))}
    assert callers.keys() == COLLECTIVE_MODULES, callers


@pytest.mark.parametrize("check", [relative_imports, bare_imports])
def test_imports_are_absolute(check: Callable[[Module], list[str]]) -> None:
    modules = [*packages(), *scripts(), *suite()]
    assert [violation for module in modules for violation in check(module)] == []


def test_packages_have_no_assert_statements() -> None:
    assert [violation for module in packages() for violation in asserts(module)] == []


@pytest.mark.parametrize(
    ("package", "without"), [("orchestrator", "torch"), ("engine", "ray"), ("workers", None)]
)
def test_package_imports_without_dependency(package: str, without: str | None) -> None:
    """Import every module of a package in a new process in which another package is missing."""
    names = [m.name for m in packages() if m.name.startswith(f"rayzero.{package}")]
    script = (
        "import importlib, sys\n"
        f"if {without!r}: sys.modules[{without!r}] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


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
    script = (
        "import sys, rayzero, rayzero.__main__ as cli\n"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "sys.argv = ['rayzero', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    loaded |= {end.code} - {0, None}\n"
        "sys.exit(repr(loaded | (heavy & set(sys.modules))) if loaded else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
