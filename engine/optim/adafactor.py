"""transformers' Adafactor (Shazeer and Stern, 2018) on shards. Results equal those on whole
parameters.

Adafactor's second moments are factored: sums over the rows and over the columns of a whole matrix,
which ranks all-reduce (`WholeParamOps.sum_over_ranks`). They are small, so every rank holds all of
them. The first moment, which exists if `beta1` is set, is sharded as other optimizers' state is.

The user's optimizer object is kept, because schedulers and Trainer refer to it. A pre-hook of its
`step` does the update of this module and removes the gradients, so that the optimizer's own update
finds none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.optim.whole_params import WholeParam, WholeParamOps


def is_adafactor(optimizer: object) -> bool:
    """Returns whether this is transformers' or fairseq's Adafactor, or its class. torch's Adafactor
    has another algorithm."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    has_name = any(base.__name__ == "Adafactor" for base in cls.__mro__)
    return has_name and hasattr(cls, "_approx_sq_grad")


@dataclass(frozen=True, eq=False)
class _Moments:
    """The second moments of a parameter, equal on all ranks.

    A parameter with more than two dimensions is a sequence of matrices. The rows of a vector are
    its elements. It has no columns.

    Attributes:
        height, width: rows and columns of one matrix.
        rows: the moments of all matrices' rows.
        columns: the moments of all matrices' columns.
    """

    param: WholeParam
    height: int
    width: int
    rows: Tensor
    columns: Tensor

    @classmethod
    def zeros(cls, param: WholeParam, like: Tensor) -> _Moments:
        sizes = param.shape[-2:] if len(param.shape) >= 2 else (param.numel, 1)
        height, width = (max(1, size) for size in sizes)
        rows = param.numel // width
        columns = rows // height * width if len(param.shape) >= 2 else 0
        return cls(param, height, width, like.new_zeros(rows), like.new_zeros(columns))

    @property
    def is_factored(self) -> bool:
        return len(self.param.shape) >= 2


@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a parameter.

    Attributes:
        start: the index of the part's first element in the flattened parameter.
        weight, grad, average: the part's weights, gradients and first moment, flat.
    """

    moments: _Moments
    start: int
    weight: Tensor
    grad: Tensor
    average: Tensor | None
    group: dict[str, Any]
    step: float

    @property
    def param(self) -> WholeParam:
        return self.moments.param

    @property
    def rows(self) -> slice:
        """The range of rows of which the part has elements."""
        stop = self.start + self.grad.numel()
        return slice(self.start // self.moments.width, -(-stop // self.moments.width))

    def in_rows(self, rows: Tensor) -> Tensor:
        """Returns the part's elements of a tensor with the values of all its rows. A view."""
        first = self.start - self.rows.start * self.moments.width
        return rows.view(-1)[first : first + self.grad.numel()]

    def add_squares(self, rows: Tensor, columns: Tensor) -> None:
        """Adds the gradient's sums of squares over rows and columns to the parameter's."""
        extent = self.rows
        squares = self.grad.new_zeros(extent.stop - extent.start, self.moments.width)
        torch.square(self.grad, out=self.in_rows(squares))
        rows[extent] += squares.sum(1)
        columns = columns.view(-1, self.moments.width)
        if len(columns) == 1:
            columns += squares.sum(0)
        elif len(columns):
            columns.index_add_(0, self.matrix_numbers(), squares.double())

    def matrix_numbers(self) -> Tensor:
        """Returns, for each row of the part, the number of its matrix."""
        numbers = torch.arange(self.rows.start, self.rows.stop, device=self.grad.device)
        return numbers // self.moments.height

    def scale_by_inverse_roots(self) -> None:
        """Divides the gradient by the roots of its elements' second moments."""
        moments, device = self.moments, self.grad.device
        if not moments.is_factored:
            self.grad.mul_(moments.rows[self.rows].to(device).rsqrt())
            return
        rows = moments.rows.view(-1, moments.height)
        row_factors = (rows / rows.mean(dim=1, keepdim=True)).rsqrt_().view(-1)[self.rows]
        column_factors = moments.columns.view(-1, moments.width).rsqrt()
        if len(column_factors) > 1:
            column_factors = column_factors[self.matrix_numbers().to(column_factors.device)]
        self.grad.mul_(self.in_rows((row_factors.unsqueeze(1) * column_factors).to(device)))

    def apply(self, rms: Tensor, clip: Tensor) -> None:
        """Applies the update, which `grad` contains, to the weights. `rms` is the parameter's root
        mean square. The update is divided by `clip`."""
        group, rate = self.group, self.group["lr"]
        if group["relative_step"]:
            highest = 1e-6 * self.step if group["warmup_init"] else 1e-2
            rate = min(highest, self.step**-0.5)
        lr = rms.new_tensor(rate)
        if group["scale_parameter"]:
            lr = rms.clamp(min=group["eps"][1]) * rate
        update = self.grad.mul_((lr / clip).to(self.grad))
        if self.average is not None:
            update = self.average.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            self.weight.mul_((1 - lr * group["weight_decay"]).to(self.weight))
        self.weight.sub_(update)


class AdafactorUpdate:
    """Updates the shards of an Adafactor optimizer at the beginning of the optimizer's `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole_params = WholeParamOps([], {})
        self._moments: list[_Moments] = []  # by the parameter's number
        # Makes the optimizer a `NeedsWholeParams`, with state for
        # `ShardedOptimizer.replicated_state`.
        vars(optimizer)["bind_whole_params"] = self.bind_whole_params
        vars(optimizer)["replicated_state"] = self.replicated_state
        optimizer.register_step_pre_hook(self._update)

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        self._whole_params = whole_params
        tensor = next(iter(whole_params.segments), torch.zeros(0))
        like = tensor.new_empty(0, dtype=torch.promote_types(tensor.dtype, torch.float32))
        self._moments = [_Moments.zeros(param, like) for param in whole_params.params]

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of the second moments, which are equal on all ranks."""
        for moments in self._moments:
            name = moments.param.name
            if moments.is_factored:
                yield f"adafactor.exp_avg_sq_row/{name}", moments.rows
                yield f"adafactor.exp_avg_sq_col/{name}", moments.columns
            else:
                yield f"adafactor.exp_avg_sq/{name}", moments.rows

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Updates all parameters. Collective if parameters are sharded."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if all(tensor.grad is None for tensor in tensors):
            return  # not a step of the engine, in which every rank has gradients
        device = tensors[0].device
        updated = [self._moments[param.number] for param in self._whole_params.params_of(tensors)]
        parts = [part for group in optimizer.param_groups for part in self._parts_of(group)]
        sizes = self._update_moments(updated, parts, device)
        for part in parts:
            part.scale_by_inverse_roots()
        squares = self._squares([(part.param.number, part.grad) for part in parts], device)
        steps = self._whole_params.sum_over_ranks(squares)
        for part in parts:
            number, numel = part.param.number, part.param.numel
            rms = (sizes[number] / numel).sqrt()
            step = (steps[number] / numel).sqrt()
            part.apply(rms, (step / part.group["clip_threshold"]).clamp_(min=1.0))
        for tensor in tensors:
            tensor.grad = None  # the optimizer's own update must not apply it

    def _parts_of(self, group: dict[str, Any]) -> Iterator[_Part]:
        """Yields this rank's parts of a group's parameters, and counts their step."""
        for tensor in group["params"]:
            if tensor.grad is None:
                continue
            state = self._optimizer.state[tensor]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            if group["beta1"] is not None and "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(tensor)
            average = state["exp_avg"].view(-1) if group["beta1"] is not None else None
            for segment in self._whole_params.segments[tensor]:
                part = segment.tensor_range
                yield _Part(
                    self._moments[segment.param.number],
                    segment.start,
                    tensor.view(-1)[part],
                    tensor.grad.view(-1)[part],
                    None if average is None else average[part],
                    group,
                    float(state["step"]),
                )

    def _squares(self, values: Iterable[tuple[int, Tensor]], device: torch.device) -> Tensor:
        """Returns the sum of squares of this rank's part of each parameter, by number."""
        squares = torch.zeros(len(self._moments), dtype=torch.float64, device=device)
        for number, value in values:
            squares[number] += value.norm().double().square()
        return squares

    def _update_moments(
        self, updated: Sequence[_Moments], parts: Sequence[_Part], device: torch.device
    ) -> Tensor:
        """Updates the second moments of these parameters. Returns the sum of squares of each
        parameter's weights, by number."""
        lengths = [len(self._moments), len(self._moments)]
        for moments in updated:
            lengths += [len(moments.rows), len(moments.columns)]
        zeros = torch.zeros(sum(lengths), dtype=torch.float64, device=device)
        squares, steps, *flat = zeros.split(lengths)
        squares += self._squares([(part.param.number, part.weight) for part in parts], device)
        sums = {
            moments.param.number: (rows, columns)
            for moments, rows, columns in zip(updated, flat[::2], flat[1::2], strict=True)
        }
        for part in parts:
            # Summed over elements, because a rank that has no part of a parameter does not know
            # the parameter's step.
            steps[part.param.number] += part.step * part.grad.numel()
            rows, columns = sums[part.param.number]
            part.add_squares(rows, columns)
        total = self._whole_params.sum_over_ranks(torch.cat([squares, steps, *flat]))
        squares, steps, *flat = torch.split(total, lengths)
        for moments, rows, columns in zip(updated, flat[::2], flat[1::2], strict=True):
            group = self._optimizer.param_groups[moments.param.group]
            step = (steps[moments.param.number] / moments.param.numel).round()
            weight = step ** group["decay_rate"]
            for moment, sum_, count in (
                (moments.rows, rows, moments.width),
                (moments.columns, columns, moments.height),
            ):
                mean = (sum_ / count + group["eps"][0]).to(moment)
                moment.lerp_(mean, weight.to(moment))
        return squares
