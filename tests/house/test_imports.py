"""Who may import what, and what an import may cost."""

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
    imported,
    packages,
    parse,
    scripts,
    suite,
    used,
)

# The only modules that talk to Ray; everything else can be driven in a test without it.
RAY_MODULES = {
    "rayzero.orchestrator.cluster.ray_api",
    "rayzero.orchestrator.job.api",
    "rayzero.orchestrator.cluster.connect",
    "rayzero.orchestrator.job.actor",
    "rayzero.orchestrator.job.client",
    "rayzero.orchestrator.job.ended_jobs",
    "rayzero.orchestrator.cluster.job_submission",
    "rayzero.orchestrator.cluster.actor_pool",
    "rayzero.orchestrator.cluster.vault_group",
    "rayzero.orchestrator.cluster.worker_group",
    "rayzero.workers.actor",
    "rayzero.workers.prestop",
    "rayzero.workers.vault.actor",
}
# The only modules that call collectives; engine/comm/collectives.py counts what passes.
COLLECTIVE_MODULES = {
    "rayzero.engine.comm.gloo",
    "rayzero.engine.comm.gloo_p2p",
    "rayzero.engine.comm.nccl",
    "rayzero.engine.comm.shared_memory",
}
COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "batch_isend_irecv", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "scatter", "send"),
)
IMPORT_LIMIT_S = 0.3


def outside(module: Module, top: str) -> bool:
    return any(name.split(".")[0] == top for _, name in imported(module))


def collective_calls(module: Module) -> list[str]:
    return [
        f"{module.name}:{line} {name}"
        for line, name in used(module)
        if name.startswith("torch.distributed.") and name.split(".")[-1].startswith(COLLECTIVES)
    ]


def relative_imports(module: Module) -> list[str]:
    return [f"{module.name}:{line}" for line, name in imported(module) if name.startswith(".")]


def bare_imports(module: Module) -> list[str]:
    """`import engine` finds the folder when run from the checkout, and a user's own elsewhere."""
    found = imported(module)
    return [f"{module.name}:{line}" for line, name in found if name.split(".")[0] in PACKAGES]


def asserts(module: Module) -> list[str]:
    """`python -O` removes them: what can go wrong is raised."""
    nodes = ast.walk(module.tree)
    return [f"{module.name}:{node.lineno}" for node in nodes if isinstance(node, ast.Assert)]


def upward_imports(graph: grimp.ImportGraph) -> list[str]:
    """Also those for type checkers only, which the layers contract leaves out."""
    floor = {f"rayzero.{package}": number for number, package in enumerate(PACKAGES)}

    def level(name: str) -> int | None:
        return floor.get(".".join(name.split(".")[:2]))

    return [
        f"{module} imports {target}"
        for module in graph.modules
        for target in graph.find_modules_directly_imported_by(module)
        if (here := level(module)) is not None
        and (there := level(target)) is not None
        and there > here
    ]


def cycle(graph: grimp.ImportGraph) -> list[str]:
    """One ring of imports, those inside functions included (they only hide it); else empty."""
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
    """The contracts of pyproject.toml, on the checkout or a copy of it."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=300
    )


def test_the_contracts_are_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("engine/x.py", "import rayzero.workers", "imports run one way"),
        ("workers/x.py", "import rayzero.orchestrator", "imports run one way"),
        ("engine/x.py", "import ray", "the engine has no ray"),
        ("orchestrator/x.py", "from rayzero.engine import x", "no torch, even indirectly"),
    ],
)
def test_a_broken_contract_is_seen_behind_the_links(
    path: str, line: str, contract: str, tmp_path: Path
) -> None:
    """On a copy with one bad line; an `engine/x.py` that imports torch is always there."""
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


def test_the_graph_sees_every_module(runtime_graph: grimp.ImportGraph) -> None:
    assert {module.name for module in packages()} == runtime_graph.modules


def test_no_import_cycle(runtime_graph: grimp.ImportGraph) -> None:
    assert cycle(runtime_graph) == []
    looped = runtime_graph
    looped.add_import(importer="rayzero.engine.errors", imported="rayzero.engine.session")
    looped.add_import(importer="rayzero.engine.session", imported="rayzero.engine.errors")
    assert len(cycle(looped)) == 3


def test_imports_run_one_way_for_type_checkers_too() -> None:
    graph = grimp.build_graph("rayzero", cache_dir=None)
    assert upward_imports(graph) == []
    graph.add_import(importer="rayzero.engine.errors", imported="rayzero.workers")
    assert upward_imports(graph) == ["rayzero.engine.errors imports rayzero.workers"]


def test_ray_is_imported_only_where_it_is_named() -> None:
    assert {module.name for module in packages() if outside(module, "ray")} == RAY_MODULES


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
def test_a_breach_is_seen(check: Callable[[Module], list[str]], bad: str, good: str) -> None:
    assert len(check(parse("m", bad))) == 1
    assert check(parse("m", good)) == []


def test_collectives_are_called_only_where_they_are_counted() -> None:
    callers = {module.name: calls for module in packages() if (calls := collective_calls(module))}
    assert callers.keys() == COLLECTIVE_MODULES, callers


@pytest.mark.parametrize("check", [relative_imports, bare_imports])
def test_imports_are_absolute(check: Callable[[Module], list[str]]) -> None:
    modules = [*packages(), *scripts(), *suite()]
    assert [breach for module in modules for breach in check(module)] == []


def test_no_assert_in_the_packages() -> None:
    assert [breach for module in packages() for breach in asserts(module)] == []


@pytest.mark.parametrize(
    ("package", "without"), [("orchestrator", "torch"), ("engine", "ray"), ("workers", None)]
)
def test_a_package_imports_alone(package: str, without: str | None) -> None:
    """Every module of a package, in a fresh process in which another package does not exist."""
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
    """Least processor time of a Python process: other work on the machine only ever adds to it."""
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
@pytest.mark.parametrize("arguments", [["-c", "import rayzero"], ["-m", "rayzero", "--help"]])
def test_the_door_opens_fast(arguments: list[str]) -> None:
    assert cpu_s(*arguments) - cpu_s("-c", "pass") < IMPORT_LIMIT_S


def test_the_door_costs_neither_torch_nor_ray() -> None:
    script = (
        "import sys, rayzero, rayzero.__main__ as door\n"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "sys.argv = ['rayzero', '--help']\n"
        "try:\n    door.main()\nexcept SystemExit as end:\n    loaded |= {end.code} - {0, None}\n"
        "sys.exit(repr(loaded | (heavy & set(sys.modules))) if loaded else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
