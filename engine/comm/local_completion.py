"""Completes a collective of torch.distributed on one rank, without the other ranks.

Used on a rank whose peers are gone, or that has not yet reached the call where its peers wait. A
reduction's result is this rank's own term. Data that would come from other ranks is replaced by
this rank's own part, or the output is left unchanged. Arguments are those of the methods of
`torch.distributed.ProcessGroup`, outputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.tensor_tree import iter_tensors


def output_tensors(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Returns the tensors that the collective `name` writes, in order."""
    return [] if name in ("barrier", "send") else list(iter_tensors(args[0]))


def complete_locally(name: str, args: tuple[Any, ...], rank: int, world_size: int) -> None:
    """Writes the outputs of the collective `name`."""
    if (complete := _COMPLETIONS.get(name)) is not None:
        complete(args[0], args[1], rank, world_size)


def _gather(outputs: Any, inputs: Any, rank: int, world_size: int) -> None:
    """Completes a gather. On ranks that only send, `outputs` is empty."""
    for parts, own in zip(outputs, inputs, strict=False):
        for part in parts:
            part.copy_(own)


def _gather_into(output: Tensor, own: Tensor, rank: int, world_size: int) -> None:
    output.view(world_size, -1).copy_(own.reshape(1, -1).expand(world_size, -1))


def _scatter(outputs: Any, inputs: Any, rank: int, world_size: int) -> None:
    """Completes a scatter. On ranks that only receive, `inputs` is empty."""
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[rank])


def _scatter_from(output: Tensor, full: Tensor, rank: int, world_size: int) -> None:
    output.view(-1).copy_(rank_chunk(full.reshape(-1), rank, world_size))


def _exchange(output: Tensor, own: Tensor, rank: int, world_size: int) -> None:
    """Completes an all-to-all. Received parts may differ from the sent ones in length. They then
    have no counterpart on this rank, and are zeros."""
    if output.numel() == own.numel():
        output.view(-1).copy_(own.reshape(-1))
    else:
        output.zero_()


Completion: TypeAlias = Callable[[Any, Any, int, int], None]


def _each(complete: Completion) -> Completion:
    def complete_each(outputs: Any, inputs: Any, rank: int, world_size: int) -> None:
        for output, own in zip(outputs, inputs, strict=True):
            complete(output, own, rank, world_size)

    return complete_each


_COMPLETIONS: Mapping[str, Completion] = {
    "allgather": _gather,
    "gather": _gather,
    "_allgather_base": _gather_into,
    "all_gather_single": _gather_into,
    "allgather_into_tensor_coalesced": _each(_gather_into),
    "all_gather_single_coalesced": _each(_gather_into),
    "scatter": _scatter,
    "reduce_scatter": _scatter,
    "_reduce_scatter_base": _scatter_from,
    "reduce_scatter_single": _scatter_from,
    "reduce_scatter_tensor_coalesced": _each(_scatter_from),
    "reduce_scatter_single_coalesced": _each(_scatter_from),
    "alltoall": _each(_exchange),
    "alltoall_base": _exchange,
    "all_to_all_single": _exchange,
}
"""The completions by collective. All other calls leave their outputs unchanged: reductions in
place, broadcasts, messages."""
