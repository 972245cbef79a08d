"""The section `compile`: torch.compile, and the keys of DeepCompile."""

from __future__ import annotations

from functools import partial
from typing import Any

from rayzero.engine.config.fields import ConfigSection
from rayzero.engine.config.keys import implemented, no_op, refused

_deepcompile = partial(no_op, reason="only DeepCompile reads it")
_deepcompile_pass = partial(_deepcompile, False)


class CompileConfig(ConfigSection):
    """torch.compile of the model, as DeepSpeed spells it."""

    enabled: bool = implemented(
        False,
        "the model is compiled: as a whole at stages 0 to 2, block by block at stage 3",
        group="compiler",
    )
    backend: str = implemented("inductor", "torch.compile's backend")
    kwargs: dict[str, Any] = implemented(
        {},
        "torch.compile's other arguments. Without `dynamic`, a job's compiled modules take any "
        "number of samples",
    )
    deepcompile: bool = implemented(
        False,
        "taken as compile.enabled, which a line in the log says: torch.compile, without "
        "DeepCompile's ZeRO inside the graph",
    )
    autoep_non_moe: bool = refused(False, "everything but experts is compiled")
    free_activation: bool = _deepcompile_pass("large activations are freed eagerly")
    free_activation_threshold: Any = _deepcompile(10_485_760, "bytes of a large activation")
    offload_activation: bool = _deepcompile_pass("activations wait in host memory for backward")
    offload_activation_pin_memory: bool = _deepcompile(True, "that memory is pinned")
    offload_opt_states: bool = _deepcompile_pass("optimizer state waits in host memory")
    offload_parameters: bool = _deepcompile_pass("weights wait in host memory")
    double_buffer: bool = _deepcompile(True, "gathers and reductions have two buffers")
    symmetric_memory: bool = _deepcompile_pass("collectives over symmetric memory")
    debug_log: bool = _deepcompile_pass("graphs are written to files")
    sync_before_reduce: bool = _deepcompile_pass("the device is synchronized before a reduction")
    sync_after_reduce: bool = _deepcompile_pass("the device is synchronized after a reduction")
    sync_before_allgather: bool = _deepcompile_pass("the device is synchronized before a gather")
    sync_after_allgather: bool = _deepcompile_pass("the device is synchronized after a gather")
    keep_int_input_tensors: bool = _deepcompile(True, "integer inputs are kept for backward")
    keep_all_input_tensors: bool = _deepcompile_pass("all inputs are kept for backward")
    passes: Any = refused(
        None,
        "DeepCompile's passes",
        "AutoSP and AutoTP split sequences and layers over ranks, which are all data-parallel",
        alternative="zero_optimization.stage 3",
        is_active=lambda passes: bool({"autosp", "autotp"} & {*map(str, passes or ())}),
    )
