"""Completes a collective of torch.distributed on one rank, as if there were no other.

For a rank whose peers are gone, or that has not come to where its peers wait: what is reduced is
this rank's term, and what would come from another rank is this rank's own part, or stays as it is.
Arguments are those of `torch.distributed.ProcessGroup`'s methods, outputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.tensor_tree import iter_tensors


def output_tensors(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that the collective `name` writes, in order."""
    return [] if name in ("barrier", "send") else list(iter_tensors(args[0]))


def complete_locally(name: str, args: tuple[Any, ...], rank: int, world_size: int) -> None:
    """Writes the outputs of the collective `name`."""
    if (complete := _COMPLETIONS.get(name)) is not None:
        complete(args[0], args[1], rank, world_size)


def _gather(outputs: Any, inputs: Any, rank: int, world_size: int) -> None:
    """Also of the rank that gathers nothing: its outputs are empty."""
    for parts, own in zip(outputs, inputs, strict=False):
        for part in parts:
            part.copy_(own)


def _gather_into(output: Tensor, own: Tensor, rank: int, world_size: int) -> None:
    output.view(world_size, -1).copy_(own.reshape(1, -1).expand(world_size, -1))


def _scatter(outputs: Any, inputs: Any, rank: int, world_size: int) -> None:
    """Also of a rank that sends nothing: its inputs are empty."""
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[rank])


def _scatter_from(output: Tensor, full: Tensor, rank: int, world_size: int) -> None:
    output.view(-1).copy_(rank_chunk(full.reshape(-1), rank, world_size))


def _exchange(output: Tensor, own: Tensor, rank: int, world_size: int) -> None:
    """Parts may differ in length, and what is received then has no counterpart here."""
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
"""All others leave their outputs as they are: reductions in place, broadcasts, messages."""
