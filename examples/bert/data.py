"""Snippets of the standard library's source: code, comments, or first lines of docstrings.

The text is available on every machine with Python. `#`, quotes and indentation are removed, because
they would reveal the label. Training and test snippets come from different files.
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
VOCAB, LENGTH = 2048, 32  # token 0 is padding, token 1 starts a snippet
TEST_INTERVAL = 5  # every fifth file is used for testing
FOLDERS = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json")
FOLDERS += ("logging", "multiprocessing", "unittest", "urllib", "xml", "")

_WORD = re.compile(r"\w+|[^\w\s]")
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(per_kind: int) -> tuple[TensorDataset, TensorDataset]:
    """Load the train and test datasets, deterministic for a given Python version.

    Args:
        per_kind: maximum number of training snippets per kind; a quarter of that for testing.

    Returns:
        (train, test), each with token ids (LENGTH,), mask (LENGTH,) and label.
    """
    sizes = {False: per_kind, True: per_kind // 4}
    texts_by_kind: dict[tuple[bool, str], list[str]] = {
        (testing, kind): [] for testing in sizes for kind in KINDS
    }
    for number, path in enumerate(_files()):
        testing = number % TEST_INTERVAL == 0
        if all(len(texts_by_kind[testing, kind]) >= sizes[testing] for kind in KINDS):
            continue  # parsing source takes longer than a short training
        for kind, text in snippets(path.read_text(encoding="utf-8", errors="replace")):
            texts_by_kind[testing, kind].append(text)
    counts = {
        testing: min(size, *(len(texts_by_kind[testing, kind]) for kind in KINDS))
        for testing, size in sizes.items()
    }
    train, test = (_tensors(texts_by_kind, testing, counts[testing]) for testing in (False, True))
    return train, test


def snippets(source: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of every snippet with at least three words in a file's source."""
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return
    pairs = [("docstring", part) for part in _docstrings(tree)]
    comments = [t.string.lstrip("#: ") for t in tokens if t.type == tokenize.COMMENT]
    pairs += [("comment", text) for text in comments]
    pairs += [("code", text) for text in _code(tree)]
    for kind, text in pairs:
        if len(_WORD.findall(text)) >= 3:
            yield kind, text


def encode(text: str) -> list[int]:
    """Token ids of words and punctuation, computed by hashing, so that no vocabulary is needed."""
    words = _WORD.findall(text)[: LENGTH - 1]
    return [1, *(2 + zlib.crc32(word.encode()) % (VOCAB - 2) for word in words)]


def _files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node)):
            yield text.splitlines()[0]  # the summary line


def _code(tree: ast.Module) -> Iterator[str]:
    """Simple statements as single lines, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Return | ast.Raise | ast.AugAssign | ast.Import):
            yield ast.unparse(node)
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield ast.unparse(node)


def _tensors(
    texts_by_kind: dict[tuple[bool, str], list[str]], testing: bool, count: int
) -> TensorDataset:
    """Dataset with `count` snippets of each kind, spread over the files, in shuffled order."""
    rows: list[tuple[list[int], int]] = []
    for label, kind in enumerate(KINDS):
        texts = texts_by_kind[testing, kind]
        rows += [(encode(texts[i * len(texts) // count]), label) for i in range(count)]
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    labels: Tensor = torch.tensor([label for _, label in rows])
    return TensorDataset(ids[order], (ids[order] != 0).long(), labels[order])
