"""The product with one wait, record or release left out, and whether the detector notices."""

from __future__ import annotations

import ast
import importlib
import inspect
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.support.races.cases import Case
from tests.support.races.running import Findings, run_case
from tests.support.races.waits import Wait, find_waits
from tests.support.virtual_device.memory import ROOT
from tests.support.virtual_device.timelines import Clock

_CPU_LIMIT_S = 3.0  # a case takes less than one
_LEFT_OUT = "_left_out_by_a_mutant"
Reached = Mapping[tuple[str, str], Sequence[Findings]]  # by (file, outermost function)


class _LeftOut:
    """What a wait that was left out returns, or the method that was not passed on: an event that
    was never recorded, work that nobody waits for."""

    clock: Clock = {}  # noqa: RUF012  never written

    def __call__(self, *_: Any) -> None:
        return

    def wait(self, *_: Any) -> None:
        return

    synchronize = release = wait

    def query(self) -> bool:
        return True


class _LeaveOut(ast.NodeTransformer):
    """Replaces one expression; a call's object is still evaluated. The original stays, in a branch
    that is never taken, so that the function still refers to the same variables."""

    def __init__(self, target: ast.expr) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._target:
            return self.generic_visit(node)
        called = self._target.func if isinstance(self._target, ast.Call) else self._target
        owner = called.value if isinstance(called, ast.Attribute) else ast.Constant(None)
        pair = ast.Tuple([owner, ast.Name(_LEFT_OUT, ast.Load())], ast.Load())
        left_out = ast.Subscript(pair, ast.Constant(1), ast.Load())
        replaced = ast.IfExp(ast.Constant(True), left_out, self._target)
        return ast.fix_missing_locations(ast.copy_location(replaced, node))


@contextmanager
def leave_out(wait: Wait) -> Iterator[None]:
    """The product without a wait."""
    function = _live_function(wait)
    function.__globals__[_LEFT_OUT] = _LeftOut()
    original, function.__code__ = function.__code__, _mutated_code(wait)
    try:
        yield
    finally:
        function.__code__ = original
        del function.__globals__[_LEFT_OUT]


def _mutated_code(wait: Wait) -> CodeType:
    path = ROOT / wait.file
    tree = ast.parse(path.read_text())
    target = next(
        node
        for node in find_waits(tree)
        if (node.lineno, node.col_offset) == (wait.line, wait.column)
        and ast.unparse(node) == wait.text
    )
    # The name under which the module was imported, for places in findings.
    filename = _live_function(wait).__code__.co_filename
    module = compile(_LeaveOut(target).visit(tree), filename, "exec", dont_inherit=True)
    return next(code for code in _codes(module) if code.co_qualname == wait.function)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _live_function(wait: Wait) -> FunctionType:
    """The function object, below its decorators."""
    module = importlib.import_module(f"rayzero.{wait.file.removesuffix('.py').replace('/', '.')}")
    found: Any = module
    for name in wait.function.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    function = inspect.unwrap(found)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{wait.function} in {wait.file} is no function")
    return function


def reached_functions(cases: Iterable[Case]) -> dict[tuple[str, str], list[Findings]]:
    """Which cases call which function of the product, with what they find without mutants. Raises
    AssertionError if that is not clean."""
    reached: dict[tuple[str, str], list[Findings]] = {}
    for case in cases:
        codes: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: Any, codes: set[CodeType] = codes) -> None:
            codes.add(frame.f_code)

        sys.settrace(note)  # calls only: no local trace function
        threading.settrace(note)
        try:
            findings = run_case(case)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        assert findings.clean, str(findings)
        for code in codes:
            file = code.co_filename.removeprefix(f"{ROOT}/").removeprefix("rayzero/")
            names = code.co_qualname.split(".<locals>")[0]
            known = reached.setdefault((file, names), [])
            if findings not in known:
                known.append(findings)
    return reached


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Ends a loop that waits for what was left out. In the main thread."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"a case took {_CPU_LIMIT_S:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `how`: a race, an early free, an error, or in what the outcome of a
    case differs from that of the product; None if it survived all `tried` cases that call the
    function."""

    wait: Wait
    tried: int
    how: str | None = None
    case: Case | None = None
    example: str = ""


def judge(wait: Wait, reached: Reached, limit: int = 100) -> Verdict:
    """Runs a mutant in the cases that call its function, until one is not clean."""
    cases = reached.get((wait.file, wait.function), ())[:limit]
    for number, product in enumerate(cases):
        with leave_out(wait), _cpu_limit():
            findings = run_case(product.case)
        if how := _difference(findings, product):
            return Verdict(wait, number + 1, how, product.case, str(findings))
    return Verdict(wait, len(cases))


def _difference(mutant: Findings, product: Findings) -> str | None:
    if mutant.races:
        return "race"
    if mutant.early_frees:
        return "early free"
    if mutant.outcome is None or product.outcome is None:
        return "error"
    return mutant.outcome.first_difference(product.outcome)
