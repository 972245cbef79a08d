"""Snippets of the standard library's source: is it code, a comment or a docstring's first line?

Real text that every machine with Python has. What gives the answer away is taken off: `#`, quotes
and indentation. Training and test snippets come from different files.
"""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

KINDS = ("code", "comment", "docstring")
VOCAB, LENGTH = 2048, 32  # token 0 is padding, token 1 begins a snippet
TEST_EVERY = 5  # every so many-th file
FOLDERS = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json")
FOLDERS += ("logging", "multiprocessing", "unittest", "urllib", "xml", "")

_WORD = re.compile(r"\w+|[^\w\s]")
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(per_kind: int) -> tuple[TensorDataset, TensorDataset]:
    """(train, test): token ids (LENGTH,), mask (LENGTH,), label; the same on every machine with the
    same Python.

    Args:
        per_kind: snippets of each kind to train on, at most; a fourth of that to test on.
    """
    sizes = {False: per_kind, True: per_kind // 4}
    found: dict[tuple[bool, str], list[str]] = {
        (testing, kind): [] for testing in sizes for kind in KINDS
    }
    for number, path in enumerate(_files()):
        testing = number % TEST_EVERY == 0
        if all(len(found[testing, kind]) >= sizes[testing] for kind in KINDS):
            continue  # reading source takes longer than a small training
        for kind, text in snippets(path.read_text(encoding="utf-8", errors="replace")):
            found[testing, kind].append(text)
    most = {
        testing: min(size, *(len(found[testing, kind]) for kind in KINDS))
        for testing, size in sizes.items()
    }
    train, test = (_tensors(found, testing, most[testing]) for testing in (False, True))
    return train, test


def snippets(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of every snippet of three words or more in a file's source."""
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return
    pairs = [("docstring", part) for part in _docstrings(tree)]
    comments = [one.string.lstrip("#: ") for one in tokens if one.type == tokenize.COMMENT]
    pairs += [("comment", text) for text in comments]
    pairs += [("code", text) for text in _code(tree)]
    for kind, text in pairs:
        if len(_WORD.findall(text)) >= 3:
            yield kind, text


def encode(text: str) -> list[int]:
    """Token ids, of words and signs, by a checksum: no vocabulary has to be kept."""
    words = _WORD.findall(text)[: LENGTH - 1]
    return [1, *(2 + zlib.crc32(word.encode()) % (VOCAB - 2) for word in words)]


def _files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node)):
            yield text.splitlines()[0]  # the line that sums it up


def _code(tree: ast.Module) -> Iterator[str]:
    """Simple statements, as one line each; no docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Return | ast.Raise | ast.AugAssign | ast.Import):
            yield ast.unparse(node)
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield ast.unparse(node)


def _tensors(found: dict[tuple[bool, str], list[str]], testing: bool, count: int) -> TensorDataset:
    """Equally many of each kind, spread over the files, in a shuffled order."""
    rows: list[tuple[list[int], int]] = []
    for label, kind in enumerate(KINDS):
        texts = found[testing, kind]
        rows += [(encode(texts[i * len(texts) // count]), label) for i in range(count)]
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    labels: Tensor = torch.tensor([label for _, label in rows])
    return TensorDataset(ids[order], (ids[order] != 0).long(), labels[order])
