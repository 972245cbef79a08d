"""Names the calls of rayzero.data that accept training data which a loader cannot read."""

from __future__ import annotations

from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.readers import INSTEAD_OF_ITERABLE, IterableStream

_BY_PACKAGE = {
    "ray": "rayzero.data.from_ray(dataset), called with the whole ray.data.Dataset in the process "
    "that submits the job, and rayzero.data.stream(...) of it",
    "datasets": "rayzero.data.stream(rayzero.data.from_hf(dataset)), which reads a dataset once to "
    "count its rows; or rayzero.data.blocks(paths of its files)",
    "webdataset": "rayzero.data.stream(rayzero.data.blocks(paths of the tars))",
}
_ANY = "rayzero.data.stream(rayzero.data.blocks(paths)), or a map-style dataset"


def way_out(data: object) -> str:
    """Returns the code to write instead of `data`, for the `fix` of an error."""
    if isinstance(data, BlockSource):
        return "rayzero.data.stream(source)"
    if isinstance(data, IterableStream):
        return INSTEAD_OF_ITERABLE
    packages = [kind.__module__.partition(".")[0] for kind in type(data).__mro__]
    return next((_BY_PACKAGE[name] for name in packages if name in _BY_PACKAGE), _ANY)
