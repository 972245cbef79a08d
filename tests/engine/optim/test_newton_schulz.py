"""Newton-Schulz iterations equal those of torch.optim.Muon, and their polynomial by SVD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.optim.muon import (
    NEWTON_SCHULZ_METHODS,
    NORM_EPS,
    newton_schulz_gram,
    newton_schulz_standard,
)

SHAPES = [(7, 10), (10, 7), (8, 8), (1, 5), (64, 16)]


def random_matrix(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_standard_equals_torch(shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape, dtype=torch.float32)
    param = nn.Parameter(torch.zeros(shape))
    muon = torch.optim.Muon([param], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    param.grad = matrix.clone()
    muon.step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    # Both round to bfloat16 at the same operations; only the scale is rounded differently.
    assert torch.allclose(
        param.detach(), newton_schulz_standard(matrix, 5).float() * -scale, rtol=1e-6
    )


@pytest.mark.parametrize("shape", [*SHAPES, (3, 6, 9)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6])
def test_gram_method_equals_the_polynomial(shape: tuple[int, ...], steps: int) -> None:
    """In float64, an iteration maps every singular value x to a x + b x^3 + c x^5."""
    matrix = random_matrix(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm(dim=(-2, -1)).unsqueeze(-1)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    assert torch.allclose(newton_schulz_gram(matrix, steps), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", NEWTON_SCHULZ_METHODS)
def test_singular_values_are_near_one(method: str) -> None:
    result = NEWTON_SCHULZ_METHODS[method](random_matrix(12, 20, dtype=torch.float32), 5).double()
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("method", NEWTON_SCHULZ_METHODS)
def test_zero_matrix_stays_zero(method: str) -> None:
    assert NORM_EPS > 0
    assert NEWTON_SCHULZ_METHODS[method](torch.zeros(4, 6), 5).count_nonzero() == 0
