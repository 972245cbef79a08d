"""transformers' Adafactor (Shazeer and Stern, 2018) on shards, equal to that of whole parameters.

Its second moments are factored: sums over the rows and over the columns of a whole matrix, which
ranks all-reduce (`WholeParamOps.sum_over_ranks`). These are few, so every rank holds all of them;
the first moment, which `beta1` adds, is sharded as every optimizer's.

The user's optimizer stays the object that it is, as schedulers and Trainer refer to it: its `step`
begins with the update here, which takes the gradients, so that its own update finds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.optim.whole_params import WholeParam, WholeParamOps


def is_adafactor(optimizer: object) -> bool:
    """Whether this is transformers' or fairseq's Adafactor, or its class; torch's is another."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    named_so = any(base.__name__ == "Adafactor" for base in cls.__mro__)
    return named_so and hasattr(cls, "_approx_sq_grad")


@dataclass(frozen=True)
class _Matrix:
    """A parameter as matrices of `height` rows one after another. The rows of a vector are its
    elements, whose moments are not factored."""

    param: WholeParam
    height: int
    width: int

    @classmethod
    def of(cls, param: WholeParam) -> _Matrix:
        if len(param.shape) < 2:
            return cls(param, max(1, param.numel), 1)
        return cls(param, *(max(1, size) for size in param.shape[-2:]))

    @property
    def is_factored(self) -> bool:
        return len(self.param.shape) >= 2

    @property
    def rows(self) -> int:
        """Those of all its matrices."""
        return self.param.numel // self.width

    @property
    def sizes(self) -> tuple[int, int]:
        """The elements of a row, and of a column."""
        return self.width, self.height

    @property
    def columns(self) -> int:
        """Those of all its matrices; of a vector none."""
        return self.rows // self.height * self.width if self.is_factored else 0


@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a parameter, which begins at its element `start`. `views`: its weights,
    gradients and, if there are any, first moments, flat."""

    matrix: _Matrix
    start: int
    views: tuple[Tensor, ...]
    group: dict[str, Any]
    step: float

    @property
    def number(self) -> int:
        return self.matrix.param.number

    @property
    def weight(self) -> Tensor:
        return self.views[0]

    @property
    def grad(self) -> Tensor:
        return self.views[1]

    @property
    def average(self) -> Tensor | None:
        return self.views[2] if len(self.views) > 2 else None

    @property
    def row_range(self) -> slice:
        """The rows that it has elements of."""
        stop = self.start + self.grad.numel()
        return slice(self.start // self.matrix.width, -(-stop // self.matrix.width))

    @property
    def _within_rows(self) -> slice:
        first = self.start - self.row_range.start * self.matrix.width
        return slice(first, first + self.grad.numel())

    def add_squares(self, rows: Tensor, columns: Tensor) -> None:
        """Adds the sums of the squares of its gradient to those of its rows and columns."""
        width, within = self.matrix.width, self.row_range
        squares = self.grad.new_zeros((within.stop - within.start) * width)
        torch.square(self.grad, out=squares[self._within_rows])
        squares = squares.view(-1, width)
        rows[within] += squares.sum(1)
        if not self.matrix.is_factored:
            return
        columns = columns.view(-1, width)
        if len(columns) == 1:
            columns += squares.sum(0)
        else:
            columns.index_add_(0, self.matrix_numbers(), squares.double())

    def from_rows(self, rows: Tensor) -> Tensor:
        """Its elements of those rows."""
        return rows.reshape(-1)[self._within_rows]

    def matrix_numbers(self) -> Tensor:
        """The matrix that each of those rows is in."""
        rows = self.row_range
        numbers = torch.arange(rows.start, rows.stop, device=self.grad.device)
        return numbers // self.matrix.height


class AdafactorUpdate:
    """The update of an Adafactor that holds shards, made at the beginning of its `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole_params = WholeParamOps([], {})
        self._matrices: list[_Matrix] = []
        self._moments: list[tuple[Tensor, Tensor]] = []  # of rows and columns, by parameter
        # `NeedsWholeParams`, and what `ShardedOptimizer.replicated_state` looks for.
        vars(optimizer)["bind_whole_params"] = self.bind_whole_params
        vars(optimizer)["replicated_state"] = self.replicated_state
        optimizer.register_step_pre_hook(self._update)

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        self._whole_params = whole_params
        self._matrices = [_Matrix.of(param) for param in whole_params.params]
        tensor = next(iter(whole_params.segments), torch.zeros(0))
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        self._moments = [
            (
                torch.zeros(matrix.rows, dtype=dtype, device=tensor.device),
                torch.zeros(matrix.columns, dtype=dtype, device=tensor.device),
            )
            for matrix in self._matrices
        ]

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the second moments, which are equal on all ranks."""
        for matrix, (rows, columns) in zip(self._matrices, self._moments, strict=True):
            if matrix.is_factored:
                yield f"adafactor.exp_avg_sq_row/{matrix.param.name}", rows
                yield f"adafactor.exp_avg_sq_col/{matrix.param.name}", columns
            else:
                yield f"adafactor.exp_avg_sq/{matrix.param.name}", rows

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Collective if parameters are sharded."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if all(tensor.grad is None for tensor in tensors):
            return  # the engine's steps have gradients on every rank
        device = tensors[0].device
        matrices = [self._matrices[it.number] for it in self._whole_params.params_of(tensors)]
        parts = [part for group in optimizer.param_groups for part in self._parts_of(group)]
        sizes = self._update_moments(matrices, parts, device)
        for part in parts:
            part.grad.mul_(self._inverse_roots(part))
        squares = self._squares({part: part.grad for part in parts}, device)
        steps = self._whole_params.sum_over_ranks(squares)
        for part in parts:
            numel = part.matrix.param.numel
            rms, step = ((it[part.number] / numel).sqrt() for it in (sizes, steps))
            _apply(part, rms, (step / part.group["clip_threshold"]).clamp_(min=1.0))
        for tensor in tensors:
            tensor.grad = None  # taken

    def _parts_of(self, group: dict[str, Any]) -> Iterator[_Part]:
        """This rank's parts of a group's parameters, whose steps are counted."""
        for tensor in group["params"]:
            if tensor.grad is None:
                continue
            state = self._optimizer.state[tensor]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            flat = [tensor.view(-1), tensor.grad.view(-1)]
            if group["beta1"] is not None:
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(tensor)
                flat.append(state["exp_avg"].view(-1))
            for segment in self._whole_params.segments[tensor]:
                views = tuple(it[segment.tensor_range] for it in flat)
                matrix = self._matrices[segment.param.number]
                yield _Part(matrix, segment.start, views, group, float(state["step"]))

    def _squares(self, values: Mapping[_Part, Tensor], device: torch.device) -> Tensor:
        """The sum of the squares of this rank's part of each parameter, by number."""
        squares = torch.zeros(len(self._matrices), dtype=torch.float64, device=device)
        for part, value in values.items():
            squares[part.number] += value.norm().double().square()
        return squares

    def _update_moments(
        self, matrices: Sequence[_Matrix], parts: Sequence[_Part], device: torch.device
    ) -> Tensor:
        """Updates the second moments of these parameters. Returns the sum of squares of each
        parameter, by number."""
        lengths = [len(self._matrices), len(self._matrices)]
        lengths += [length for it in matrices for length in (it.rows, it.columns)]
        squares, steps, *flat = torch.zeros(sum(lengths), dtype=torch.float64, device=device).split(
            lengths
        )
        squares += self._squares({part: part.weight for part in parts}, device)
        numbers = [it.param.number for it in matrices]
        sums = dict(zip(numbers, zip(flat[::2], flat[1::2], strict=True), strict=True))
        for part in parts:
            # A rank may have no part of a parameter, and so not know its step.
            steps[part.number] += part.step * part.grad.numel()
            part.add_squares(*sums[part.number])
        total = self._whole_params.sum_over_ranks(torch.cat([squares, steps, *flat]))
        squares, steps, *flat = torch.split(total, lengths)
        for matrix, *both in zip(matrices, flat[::2], flat[1::2], strict=True):
            group = self._optimizer.param_groups[matrix.param.group]
            step = (steps[matrix.param.number] / matrix.param.numel).round()
            moments = self._moments[matrix.param.number]
            for moment, sum_, count in zip(moments, both, matrix.sizes, strict=True):
                mean = (sum_ / count + group["eps"][0]).to(moment)
                moment.lerp_(mean, (step ** group["decay_rate"]).to(moment))
        return squares

    def _inverse_roots(self, part: _Part) -> Tensor:
        """The elements of a part are divided by the roots of their second moments."""
        matrix, (rows, columns) = part.matrix, self._moments[part.number]
        device = part.grad.device
        if not matrix.is_factored:
            return rows[part.row_range].to(device).rsqrt()
        rows = rows.view(-1, matrix.height)
        of_rows = (rows / rows.mean(dim=1, keepdim=True)).rsqrt_().view(-1)[part.row_range]
        of_columns = columns.view(-1, matrix.width).rsqrt()
        if len(of_columns) > 1:
            of_columns = of_columns[part.matrix_numbers().to(of_columns.device)]
        return part.from_rows((of_rows.unsqueeze(1) * of_columns).to(device))


def _apply(part: _Part, rms: Tensor, clip: Tensor) -> None:
    """Changes the weights by the update in the gradient. `rms`: the parameter's root mean square;
    `clip`: what the update is divided by."""
    group, rate = part.group, part.group["lr"]
    if group["relative_step"]:
        least = 1e-6 * part.step if group["warmup_init"] else 1e-2
        rate = min(least, part.step**-0.5)
    lr = rms.clamp(min=group["eps"][1]) * rate if group["scale_parameter"] else rms.new_tensor(rate)
    update = part.grad.mul_((lr / clip).to(part.grad))
    if part.average is not None:
        update = part.average.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
    if group["weight_decay"]:
        part.weight.mul_((1 - lr * group["weight_decay"]).to(part.weight))
    part.weight.sub_(update)
