"""Adapters to vLLM. Nothing in `engine`, `workers` and `orchestrator` imports this package, which
needs vLLM 0.28 or newer: `rayzero[vllm]`.

| | side | by |
|---|---|---|
| `EngineWeightSource` | trainer | vLLM's own `nccl` and `ipc` backends, which rayzero feeds |
| `VaultWeightTransferEngine` | vLLM's workers | the backend `rayzero`: reads the node's vault |
| `VaultWeights` | a role's function | loads the newest version into its vLLM, by that backend |
"""

from __future__ import annotations

import logging
from functools import cache

BACKEND = "rayzero"
"""The name for `WeightTransferConfig(backend=...)` and `--weight-transfer-config`."""

log = logging.getLogger("rayzero.vllm")


@cache
def register() -> None:
    """Makes the backend known to vLLM, once in each of its processes.

    vLLM calls this by the entry point `vllm.general_plugins`, even if the backend is not used, so
    an older vLLM only gets a warning.
    """
    try:
        # WeightSource exists from 0.28 on, when the constructors of engines changed, too.
        from vllm.distributed.weight_transfer import WeightSource, WeightTransferEngineFactory  # noqa: F401
    except ImportError as error:
        log.warning("the weight transfer backend %r needs vllm>=0.28: %s", BACKEND, error)
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "rayzero.vllm.vault_engine", "VaultWeightTransferEngine"
    )
