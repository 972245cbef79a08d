"""The random states of a rank, as JSON can hold them."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
import xxhash


def taken(device: torch.device) -> dict[str, Any]:
    """The states of torch's (and its device's), Python's and NumPy's generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _text(np.array(words, dtype=np.uint64).tobytes()), gauss],
        "numpy": [str(kind), _text(np.asarray(keys).tobytes()), position, has_gauss, cached],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def put_back(states: dict[str, Any], device: torch.device) -> None:
    """Sets the generators to states that `taken` gave. What is not in them stays as it is."""
    torch.set_rng_state(_tensor(states["torch"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_array(words, np.uint64).tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, _array(keys, np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def branch_off(states: dict[str, Any], rank: int, device: torch.device) -> None:
    """Seeds the generators of a rank that has no state of its own from another rank's."""
    seed = xxhash.xxh3_64_intdigest(b64decode(states["torch"]), seed=rank)
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed % 2**63)


def _text(raw: bytes) -> str:
    return b64encode(raw).decode()


def _array(text: str, dtype: type) -> Any:
    return np.frombuffer(b64decode(text), dtype=dtype)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
