"""Measures the tests' power: the share of random one-place changes of the product that they notice.

    pip install cosmic-ray
    python -m tools.mutants --count 200 --seed 1 --json mutants.json

Each mutant is one operator of cosmic-ray applied at one place of a random line of engine/, workers/
or orchestrator/. It runs in a copy of the repository: first the test files that import the module,
then the fast tests of the folder that mirrors its own, until one fails. That test must pass without
the change, or the mutant is left out. A mutant that no test notices is printed; some of them are
equivalent to the original. Two runs with one seed on one commit have the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "workers", "orchestrator")
OPERATORS = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator",
    "ReplaceComparisonOperator",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
)
"""Beginnings of the names of the operators that are used."""
_SUITE_LIMIT_S = 900.0


@dataclass(frozen=True)
class Mutant:
    """`changed` is the text of `path` with one operator applied at its `occurrence`-th place."""

    path: str
    operator: str
    occurrence: int
    line: int
    changed: str


@dataclass(frozen=True)
class Verdict:
    """`killer` is the first test that noticed, or empty."""

    path: str
    operator: str
    line: int
    diff: str
    killer: str
    duration_s: float


def choose_mutants(seed: int) -> Iterator[Mutant]:
    """Yields mutants without end: a line at random, then an operator that applies in it.

    Lines are weighted equally, so that a large file has as many mutants as small ones together.
    """
    import parso
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in sorted(operator_names()) if name.split("/")[1].startswith(OPERATORS)]
    operators = {name: get_operator(name)() for name in names}
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    places = [(path, n) for path, text in texts.items() for n in range(1, text.count("\n") + 1)]
    generator = random.Random(seed)
    positions: dict[Path, dict[int, list[tuple[str, int]]]] = {}
    while True:
        path, line = generator.choice(places)
        if path not in positions:
            positions[path] = {}
            nodes = list(_walk(parso.parse(texts[path])))
            for name, operator in operators.items():
                found = [place for node in nodes for place in operator.mutation_positions(node)]
                for occurrence, ((start, _), _) in enumerate(found):
                    positions[path].setdefault(start, []).append((name, occurrence))
        candidates = positions[path].get(line)
        if not candidates:
            continue
        name, occurrence = generator.choice(candidates)
        changed = mutate_code(texts[path], operators[name], occurrence)
        if changed is not None and _code(changed) != _code(texts[path]):
            yield Mutant(str(path.relative_to(ROOT)), name, occurrence, line, changed)


def _code(text: str) -> str:
    """A module's syntax tree without annotations, which are never evaluated."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def _walk(node: object) -> Iterator[object]:
    """Yields nodes in the order in which cosmic-ray counts occurrences."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def suites(path: str) -> list[list[str]]:
    """The test files that may notice a change of `path`, in the order in which they are run."""
    module = "rayzero." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, name = module.rpartition(".")[::2]
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    direct = [
        file
        for file in files
        if f"from {module} import" in (text := (ROOT / file).read_text(encoding="utf-8"))
        or f"from {package} import {name}" in text
    ]
    folder = Path("tests") / Path(path).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    near = [file for file in files if Path(file).is_relative_to(folder) and file not in direct]
    return [direct, near]


def judge(mutant: Mutant, copy: Path) -> Verdict | None:
    """Runs the suites of a mutant, in the copy of the repository, which is restored then.

    Returns:
        None if the test that failed fails without the change too.
    """
    target = copy / mutant.path
    original = target.read_text(encoding="utf-8")
    diff = "".join(
        difflib.unified_diff(original.splitlines(True), mutant.changed.splitlines(True), n=0)
    )
    started = time.monotonic()
    target.write_text(mutant.changed, encoding="utf-8")
    try:
        killer = next(filter(None, (failing(files, copy) for files in suites(mutant.path))), "")
    finally:
        target.write_text(original, encoding="utf-8")
    if "::" in killer and failing([killer], copy):
        return None
    place = (mutant.path, mutant.operator, mutant.line)
    return Verdict(*place, diff, killer, round(time.monotonic() - started, 1))


def failing(tests: list[str], copy: Path) -> str:
    """The first of the fast tests among `tests` that fails, or empty; a run that hangs fails."""
    if not tests:
        return ""
    options = ["-q", "-x", "-n", "2", "--dist", "loadfile", "-m", "not slow and not alone"]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *tests],
            cwd=copy,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SUITE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    if run.returncode in (0, 5):  # 5: no test was selected
        return ""
    lines = run.stdout.splitlines()
    failed = (line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, f"exit code {run.returncode}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How many random mutants do the tests notice?")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a path prefix, such as engine/zero")
    parser.add_argument("--json", type=Path, help="where the verdicts are written, one by one")
    options = parser.parse_args(arguments)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=-1, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for mutant in choose_mutants(options.seed):
            if not mutant.path.startswith(options.only):
                continue
            verdict = judge(mutant, Path(folder))
            if verdict is None:
                print(
                    f"left out: {mutant.path}:{mutant.line}, its test fails without it", flush=True
                )
                continue
            verdicts.append(verdict)
            outcome = f"killed by {verdict.killer}" if verdict.killer else f"ALIVE\n{verdict.diff}"
            killed = sum(bool(verdict.killer) for verdict in verdicts)
            print(f"{killed}/{len(verdicts)} {mutant.path}:{mutant.line} {outcome}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(item) for item in verdicts], indent=1))
            if len(verdicts) == options.count:
                break


if __name__ == "__main__":
    main()
