"""Measures the tests' power: the share of random one-place changes of the product that they notice.

    python -m tools.mutants --count 200 --seed 1 --json mutants.json

A mutant changes one place in a function of engine/, workers/ or orchestrator/: a comparison, a
number, `and`, `not`, a condition, an operator, a call or a returned value that is left out, two
arguments in the wrong order. Lines have equal weights. A mutant runs in a copy of the repository:
first the test files that import the module, then the fast tests of the folder that mirrors its own,
until one fails or the time is up. That test must pass without the change, or the mutant is left
out. A mutant that no test notices is printed; some of them are equivalent to the original. Two runs
with one seed on one commit have the same mutants, so a run that was interrupted continues from its
JSON file.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "workers", "orchestrator")
_OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OTHER_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_NOT_TRIED = ("annotation", "returns", "decorator_list", "type_comment")
_FAILURES = ("FAILED ", "ERROR ")
_LOG_NAMES = ("log", "_log", "logger", "_logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """`changed` is the text of `path` with one place changed."""

    path: str
    operator: str
    line: int
    changed: str


@dataclass(frozen=True)
class Verdict:
    """`killer` is the first test that noticed, or empty; `left_out` says why it does not count;
    `finished`: all tests were run, as far as one did not fail."""

    path: str
    operator: str
    line: int
    diff: str
    killer: str
    left_out: str
    finished: bool
    duration_s: float


def choose_mutants(seed: int) -> Iterator[Mutant]:
    """Yields mutants without end: a line at random, then one of the changes that apply in it.

    Lines are weighted equally, so that a large file has as many mutants as small ones together.
    """
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    lines = [(path, n) for path, text in texts.items() for n in range(1, text.count("\n") + 1)]
    generator = random.Random(seed)
    places: dict[Path, list[ast.expr | ast.stmt]] = {}
    while True:
        path, line = generator.choice(lines)
        if path not in places:
            places[path] = list(_nodes(ast.parse(texts[path]), in_function=False))
        nodes = [node for node in places[path] if node.lineno == line]
        changes = [change for node in nodes for change in _changes(node)]
        if changes:
            place, operator, new = generator.choice(changes)
            changed = _replace(texts[path], place, new)
            yield Mutant(str(path.relative_to(ROOT)), operator, line, changed)


def _nodes(node: ast.AST, in_function: bool) -> Iterator[ast.expr | ast.stmt]:
    """Yields the nodes of functions' bodies, but annotations, decorators and formatted strings."""
    if in_function and isinstance(node, ast.expr | ast.stmt):
        yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        in_function = True
    for name, value in ast.iter_fields(node):
        if name in _NOT_TRIED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _nodes(child, in_function)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yields the changes at a node: what to replace, the change's name, the new source."""
    match node:
        case ast.Compare(left, [operator, *others], comparators):
            for other in _OTHER_COMPARISONS[type(operator)]:
                yield (
                    node,
                    "comparison",
                    _unparse(ast.Compare(left, [other(), *others], comparators)),
                )
        case ast.Constant(value=bool() as value):
            yield node, "constant", str(not value)
        case ast.Constant(value=int() | float() as number):
            yield node, "number + 1", f"({number + 1})"
            yield node, "number - 1", f"({number - 1})"
        case ast.BoolOp(operator, values):
            boolean = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, "and/or", _unparse(ast.BoolOp(boolean, values))
        case ast.UnaryOp(ast.Not(), operand):
            yield node, "not", _unparse(operand)
        case ast.BinOp(left, operator, right) if type(operator) in _OTHER_OPERATORS:
            yield (
                node,
                "operator",
                _unparse(ast.BinOp(left, _OTHER_OPERATORS[type(operator)](), right)),
            )
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "no value", "return None"
        case ast.Expr(ast.Call() | ast.Await()) if not _is_logging(node):
            yield node, "no call", "pass"
        case ast.Call(function, [first, second, *rest], keywords) if not _is_logging(node):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and ast.dump(first) != ast.dump(second):
                swapped = ast.Call(function, [second, first, *rest], keywords)
                yield node, "arguments", ast.unparse(swapped)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield test, "condition", _unparse(ast.UnaryOp(ast.Not(), test))


def _unparse(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _is_logging(node: ast.expr | ast.Expr) -> bool:
    """A call that only tells what happens: few tests look at logs."""
    name = ast.unparse(node).removeprefix("await ").partition("(")[0]
    return name.partition(".")[0] in _LOG_NAMES


def _replace(text: str, place: ast.expr | ast.stmt, new: str) -> str:
    """Replaces a node's source; columns count bytes of UTF-8."""
    source = text.encode()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    begin = starts[place.lineno - 1] + place.col_offset
    end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
    return (source[:begin] + new.encode() + source[end:]).decode()


def suites(path: str) -> list[list[str]]:
    """The test files that may notice a change of `path`, in the order in which they are run: those
    without ranks are quick."""
    module = "rayzero." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, name = module.rpartition(".")[::2]
    texts = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    files = sorted(texts, key=lambda file: ("run_ranks" in texts[file], file))
    imports = (f"from {module} import", f"from {package} import {name}")
    direct = [file for file in files if any(line in texts[file] for line in imports)]
    folder = Path("tests") / Path(path).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    near = [file for file in files if Path(file).is_relative_to(folder) and file not in direct]
    return [direct, near]


def judge(mutant: Mutant, copy: Path, limit_s: float, processes: int) -> Verdict:
    """Runs the suites of a mutant, in the copy of the repository, which is restored then."""
    target = copy / mutant.path
    original = target.read_text(encoding="utf-8")
    diff = "".join(
        difflib.unified_diff(original.splitlines(True), mutant.changed.splitlines(True), n=0)
    )
    started = time.monotonic()
    killer: str | None = ""
    left_out = ""
    target.write_text(mutant.changed, encoding="utf-8")
    try:
        for files in suites(mutant.path):
            if killer == "":
                left_s = limit_s - (time.monotonic() - started)
                killer = failing(files, copy, left_s, processes)
    finally:
        target.write_text(original, encoding="utf-8")
    if killer and "::" in killer and failing([killer], copy, limit_s, processes):
        left_out = f"{killer} fails without the change too"
    seconds = round(time.monotonic() - started, 1)
    place = (mutant.path, mutant.operator, mutant.line)
    return Verdict(*place, diff, killer or "", left_out, killer is not None, seconds)


def failing(tests: list[str], copy: Path, limit_s: float, processes: int) -> str | None:
    """The first of the fast tests among `tests` that fails, or empty; None if the time is up. A
    test that hangs fails after a quarter of the limit."""
    if not tests:
        return ""
    if limit_s <= 0:
        return None
    options = ["-q", "-x", "-n", str(processes), "-m", "not slow and not alone"]
    options += ["-p", "no:cacheprovider", f"--timeout={limit_s / 4}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    run = subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = run.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        return None
    if run.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = (line.split()[1] for line in output.splitlines() if line.startswith(_FAILURES))
    return next(failed, f"exit code {run.returncode}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How many random mutants do the tests notice?")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a path prefix, such as engine/zero")
    parser.add_argument("--limit-s", type=float, default=900.0, help="a mutant's time")
    parser.add_argument("--processes", type=int, default=2, help="pytest-xdist's; 0 for none")
    parser.add_argument("--json", type=Path, help="where the verdicts are; continued if it exists")
    options = parser.parse_args(arguments)
    verdicts: list[Verdict] = []
    if options.json and options.json.exists():
        verdicts = [Verdict(**item) for item in json.loads(options.json.read_text())]
    chosen = (item for item in choose_mutants(options.seed) if item.path.startswith(options.only))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=-1, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for mutant in islice(chosen, len(verdicts), options.count):
            verdict = judge(mutant, Path(folder), options.limit_s, options.processes)
            verdicts.append(verdict)
            if verdict.left_out:
                outcome = f"left out: {verdict.left_out}"
            else:
                alive = "ALIVE" if verdict.finished else "ALIVE when the time was up"
                outcome = f"killed by {verdict.killer}" if verdict.killer else alive
            counted = [item for item in verdicts if not item.left_out]
            killed = sum(bool(item.killer) for item in counted)
            print(f"{killed}/{len(counted)} {verdict.path}:{verdict.line} {outcome}", flush=True)
            if not verdict.killer:
                print(verdict.diff, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(item) for item in verdicts], indent=1))


if __name__ == "__main__":
    main()
