"""A matrix's singular vectors with all singular values near 1, by a few multiplications.

The quintic Newton-Schulz iteration with Keller Jordan's coefficients (Jordan et al., 2024): they do
not converge to 1 but to between 0.7 and 1.2, which is enough and is fast. Two ways with one result
but for rounding:

- standard: on the matrix itself, in bfloat16, as torch.optim.Muon does.
- gram: on the smaller Gram matrix X X', which is all that the polynomial needs; its factor is
  applied to X at the end, and once in between, because rounding grows in the Gram matrix (gram
  Newton-Schulz, T. Dao et al., 2026). In fp16 on GPUs, elsewhere in the matrix's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
RESTART = 2  # steps after which the Gram matrix is formed anew


def standard(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalises (..., rows, columns) in bfloat16."""
    wide = _normed(_wide(matrix.bfloat16()))
    for _ in range(steps):
        product = wide @ wide.mT
        wide = _mul_add(wide, A, _mul_add(product, B, product, product, C), wide, 1.0)
    return _turned_back(wide, matrix)


def gram(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalises (..., rows, columns) through the Gram matrix."""
    wide = _wide(matrix if matrix.dtype is torch.float64 else matrix.float())
    wide = _normed(wide)
    wide = wide.half() if wide.is_cuda else wide
    product, factor = wide @ wide.mT, None
    for step in range(steps):
        if step == RESTART and factor is not None:
            wide, factor = factor @ wide, None
            product = wide @ wide.mT
        change = _mul_add(product, B, product, product, C)
        change.diagonal(dim1=-2, dim2=-1).add_(A)
        factor = change if factor is None else change @ factor
        if step + 1 not in (RESTART, steps):
            product = change @ product @ change  # all are polynomials of it, and commute
    return _turned_back(wide if factor is None else factor @ wide, matrix)


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {"standard": standard, "gram": gram}
ROUNDED = {"standard": torch.bfloat16, "gram": None}
"""The dtype that a method rounds to before anything else; values may travel in it."""


def _normed(matrix: Tensor) -> Tensor:
    """With a Frobenius norm of 1, so that no singular value is above it."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return matrix / norm.clamp(min=EPS)


def _mul_add(term: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """beta term + alpha left right, rounded once."""
    add = torch.addmm if term.ndim == 2 else torch.baddbmm
    return add(term, left, right, beta=beta, alpha=alpha)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix


def _turned_back(wide: Tensor, matrix: Tensor) -> Tensor:
    return wide.mT if matrix.size(-2) > matrix.size(-1) else wide
