"""`VaultWeights`: brings a role's vLLM to the newest version of the trainer's weights."""

from __future__ import annotations

from typing import Any, Protocol

from rayzero.workers.roles.weights import RoleWeights
from rayzero.workers.weights.directory import WeightVersion
from rayzero.workers.weights.reader import LentVersion


class WeightSyncClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`: the calls that update a vLLM. Each returns when all workers of
    the vLLM have done it, and raises their errors."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class LLMClient:
    """The client of a `vllm.LLM` in this process. Each update also clears its prefix cache, which
    was computed with older weights."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()


class VaultWeights:
    """`ctx.weights` for a vLLM that was made with
    `weight_transfer_config=WeightTransferConfig(backend="rayzero")`.

    Args:
        weights: `ctx.weights` of the role's function.
        client: client of a vLLM on this node: `LLMClient(llm)`, or vLLM's own for servers and
            actors. The caller pauses a server around `refresh`.
        engine: the name of one of the trainer's engines; None: the first one.

    Example:
        >>> llm = vllm.LLM(model, weight_transfer_config=WeightTransferConfig(backend="rayzero"))
        >>> weights = VaultWeights(ctx.weights, LLMClient(llm), engine="policy")
        >>> for task in ctx.tasks(prompts=32):
        ...     weights.refresh()
        ...     task.done(make_samples(llm.generate([it.text for it in task.prompts], sampling)))
    """

    def __init__(
        self, weights: RoleWeights, client: WeightSyncClient, engine: str | None = None
    ) -> None:
        self._weights = weights
        self._client = client
        self._engine = engine
        self._initialized = False
        self._loaded: WeightVersion | None = None

    def refresh(self) -> WeightVersion:
        """Loads the newest version, unless vLLM has it already. Waits for the first version. If
        this raises, vLLM may have parts of several versions until a later call has returned.

        vLLM's `weight_version` is the version's step.

        Raises:
            NoVersionError: no version could be read in time.
            VaultMemoryError: the node has no room for the slots of other nodes.
            Any error of the client, unless the version was overwritten meanwhile.
        """
        if not self._initialized:
            self._client.init_weight_transfer_engine({})
            self._initialized = True
        loaded = self._loaded
        self._loaded = None  # until the next version is loaded completely
        self._loaded = self._weights.lend(self._update, loaded)
        return self._loaded

    def _update(self, lent: LentVersion) -> None:
        self._client.start_weight_update()
        info = {"slots": [list(ref) for ref in lent.slots], "paths": list(lent.paths)}
        self._client.update_weights(info | {"engine": self._engine})
        self._client.finish_weight_update(str(lent.version.step))
