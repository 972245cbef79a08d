"""Muon (Jordan et al., 2024): steps by the orthogonalised momentum of matrices. Other parameters
use Adam.

A matrix is orthogonalised as a whole, once a step, on the rank that owns it
(`WholeParamOps.transform`). Everything else is elementwise on each rank's shard.

Orthogonalisation is the quintic Newton-Schulz iteration with Keller Jordan's coefficients, which
brings singular values to between 0.7 and 1.2 in few steps. Two methods differ only in rounding:

- standard: iterates on the matrix X itself, in bfloat16, as torch.optim.Muon does.
- gram: iterates on the smaller Gram matrix X X', which is all that the polynomial needs. The
  accumulated factor is applied to X at the end, and once in between because rounding errors grow in
  the Gram matrix (gram Newton-Schulz, T. Dao et al., 2026). Uses fp16 on GPUs, elsewhere fp32, or
  fp64 for fp64 matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.config.optimizers import MuonParams
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.whole_params import WholeParam, WholeParamOps

A = 3.4445
B = -4.7750
C = 2.0315
NORM_EPS = 1e-7
GRAM_RESTART_STEP = 2  # steps after which the Gram matrix is recomputed


def newton_schulz_standard(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalise (..., rows, columns) in bfloat16."""
    x = _normalize(_transpose_if_tall(matrix.bfloat16(), matrix))
    for _ in range(steps):
        gram = x @ x.mT
        x = _mul_add(x, A, _mul_add(gram, B, gram, gram, C), x, 1.0)
    return _transpose_if_tall(x, matrix)


def newton_schulz_gram(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalise (..., rows, columns) through the Gram matrix."""
    x = matrix if matrix.dtype is torch.float64 else matrix.float()
    x = _normalize(_transpose_if_tall(x, matrix))
    x = x.half() if x.is_cuda else x
    gram, factor = x @ x.mT, None
    for step in range(steps):
        if step == GRAM_RESTART_STEP and factor is not None:
            x, factor = factor @ x, None
            gram = x @ x.mT
        change = _mul_add(gram, B, gram, gram, C)
        change.diagonal(dim1=-2, dim2=-1).add_(A)
        factor = change if factor is None else change @ factor
        if step + 1 not in (GRAM_RESTART_STEP, steps):
            gram = change @ gram @ change  # polynomials of one matrix commute
    return _transpose_if_tall(x if factor is None else factor @ x, matrix)


NEWTON_SCHULZ_METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "standard": newton_schulz_standard,
    "gram": newton_schulz_gram,
}
INPUT_DTYPES = {"standard": torch.bfloat16, "gram": None}
"""The dtype to which each method casts its input, and in which values may be communicated. None if
the method does not round its input."""


def _normalize(matrix: Tensor) -> Tensor:
    """Scale to a Frobenius norm of 1, which bounds the singular values."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return matrix / norm.clamp(min=NORM_EPS)


def _mul_add(term: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """Returns beta * term + alpha * left @ right, rounded once."""
    add = torch.addmm if term.ndim == 2 else torch.baddbmm
    return add(term, left, right, beta=beta, alpha=alpha)


def _transpose_if_tall(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns the transpose of `x` if `matrix` has more rows than columns, else `x`, so that the
    Gram matrix is the smaller one."""
    return x.mT if matrix.size(-2) > matrix.size(-1) else x


_DEFAULTS = MuonParams()
MUON_DEFAULTS = {"lr": 0.02} | _DEFAULTS.model_dump(
    include={"momentum", "weight_decay", "nesterov", "ns_method", "ns_steps", "adjust_lr_fn"}
)
ADAM_DEFAULTS = {"lr": 3e-4} | _DEFAULTS.model_dump(include={"betas", "eps", "weight_decay"})


class Muon(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, Adam for the others. Gradients of matrices are overwritten.

    Options of a group default to `MUON_DEFAULTS` or `ADAM_DEFAULTS`.

    Args:
        params: parameter groups; `use_muon` defaults to whether all parameters are matrices.
        decoupled: decouple Adam's weight decay, as AdamW does.
    """

    def __init__(self, params: Iterable[Any], *, decoupled: bool = True) -> None:
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self._inferred_groups = [
            number for number, group in enumerate(groups) if "use_muon" not in group
        ]
        # Works on the groups and the state of this optimizer.
        adam_class = torch.optim.AdamW if decoupled else torch.optim.Adam
        self._adam = adam_class([torch.zeros(0)], fused=True)
        super().__init__([_with_defaults(group, self._adam.defaults) for group in groups], {})
        self._whole_params = WholeParamOps.of_optimizer(self)

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        """Uses these whole parameters. Raises ConfigError if a group's `use_muon` is wrong or
        cannot be inferred."""
        for number, group in enumerate(self.param_groups):
            shapes = [param.shape for param in whole_params.params_in_groups([number])]
            not_matrices = [shape for shape in shapes if not is_matrix(shape)]
            if group["use_muon"] and not_matrices:
                raise ConfigError(
                    f"parameter group {number} has use_muon and a parameter of shape "
                    f"{not_matrices[0]}",
                    allowed="use_muon for parameters of two dimensions or more",
                    fix="set use_muon of that parameter, or of that group",
                )
            inferred = number in self._inferred_groups
            if inferred and shapes and not not_matrices and not group["use_muon"]:
                raise ConfigError(
                    f"parameter group {number} does not set use_muon",
                    allowed="use_muon: true or false in every group",
                    fix='change the groups, or use "optimizer": {"type": "Muon"} in the config',
                )
        self._whole_params = whole_params

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective if parameters are sharded."""
        loss = closure() if closure is not None else None
        self._step_adam()
        parts: dict[int, Tensor] = {}
        updates: list[tuple[Tensor, Tensor, float]] = []
        numbers = [number for number, group in enumerate(self.param_groups) if group["use_muon"]]
        muon_groups = [self.param_groups[number] for number in numbers]
        for group in muon_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                direction = self._update_momentum(tensor, tensor.grad, group).view(-1)
                weight = tensor.view(-1).mul_(1 - group["lr"] * group["weight_decay"])
                for segment in self._whole_params.segments[tensor]:
                    size = group["lr"] * update_scale(segment.param.shape, group["adjust_lr_fn"])
                    part = direction[segment.tensor_range]
                    parts[segment.param.number] = part
                    updates.append((weight[segment.tensor_range], part, size))
        updated = [tensor for group in self.param_groups for tensor in group["params"]]
        dtypes = {INPUT_DTYPES[group["ns_method"]] for group in muon_groups}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._whole_params.transform(numbers, updated, parts, self._orthogonalize, dtype)
        for weight, direction, size in updates:
            weight.add_(direction, alpha=-size)
        return loss

    def _step_adam(self) -> None:
        self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adam.state = self.state
        if any(group["params"] for group in self._adam.param_groups):
            self._adam.step()

    def _update_momentum(self, tensor: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum. Returns the gradient's memory with the matrix to orthogonalise."""
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp_(average, group["momentum"]) if group["nesterov"] else grad.copy_(average)

    def _orthogonalize(self, param: WholeParam, values: Tensor) -> Tensor:
        group = self.param_groups[param.group]
        matrix = values.view(_matrix_shape(param.shape))
        return NEWTON_SCHULZ_METHODS[group["ns_method"]](matrix, group["ns_steps"]).reshape(-1)


def is_matrix(shape: Sequence[int]) -> bool:
    return len(shape) >= 2


def update_scale(shape: Sequence[int], how: str) -> float:
    """Returns the factor of a matrix's step, which depends on the matrix's shape.

    "original" is Jordan's factor, from the last two dimensions. "match_rms_adamw" gives steps the
    root mean square of AdamW's (Liu et al., 2025).
    """
    if how == "match_rms_adamw":
        rows, columns = _matrix_shape(shape)[-2:]
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, shape[-2] / shape[-1]))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns (rows, columns) for a convolution, whose filters form one matrix. Other shapes are
    batches of matrices, and returned unchanged."""
    return (shape[0], prod(shape[1:])) if len(shape) == 4 else tuple(shape)


def _with_defaults(group: dict[str, Any], torch_defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns a group with all options of its algorithm. For Adam that includes torch's options."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    all_matrices = bool(params) and all(is_matrix(param.shape) for param in params)
    muon = group.get("use_muon", all_matrices)
    defaults = MUON_DEFAULTS if muon else torch_defaults | ADAM_DEFAULTS
    return {**defaults, **group, "params": params, "use_muon": muon}
