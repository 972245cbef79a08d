"""Keys of `zero_optimization.offload_optimizer` and `zero_optimization.offload_param`."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED, Key

_O = "zero_optimization.offload_optimizer."
_P = "zero_optimization.offload_param."
_CPU_ONLY = "weights rest in CPU memory, not in files"

OPTIMIZER = (
    Key(
        _O + "device", IMPLEMENTED, "main weights and optimizer state rest here: none, cpu or nvme"
    ),
    Key(_O + "nvme_path", IMPLEMENTED, "the folder for device nvme"),
    Key(
        _O + "buffer_count",
        IMPLEMENTED,
        "pieces of the state in CPU memory at once, with device nvme",
    ),
    Key(
        _O + "pin_memory",
        NO_OP,
        "CPU memory is page-locked, so copies can overlap",
        "always so here, where there is a GPU",
    ),
    Key(
        _O + "pipeline_read", NO_OP, "the next piece is read while one is updated", "always so here"
    ),
    Key(
        _O + "pipeline_write",
        NO_OP,
        "the last piece is written while one is updated",
        "always so here",
    ),
    Key(
        _O + "fast_init",
        NO_OP,
        "files are made without writing zeros",
        "always so here",
    ),
    Key(_O + "ratio", IMPLEMENTED, "the share of the elements that is offloaded"),
    Key(
        _O + "super_offload",
        REFUSED,
        "an offload engine for superchips",
        "it is made for one kind of machine",
        "device: cpu",
    ),
    Key(
        _O + "cpuadam_cores_perc",
        NO_OP,
        "the share of cores that steps the optimizer for super_offload",
        "it has a meaning with super_offload only",
    ),
)

PARAM = (
    Key(_P + "device", IMPLEMENTED, "shards of the weights rest here at stage 3: none or cpu"),
    Key(_P + "nvme_path", NO_OP, "the folder for device nvme", _CPU_ONLY),
    Key(_P + "buffer_count", NO_OP, "buffers in CPU memory for device nvme", _CPU_ONLY),
    Key(_P + "buffer_size", NO_OP, "elements of such a buffer", _CPU_ONLY),
    Key(_P + "max_in_cpu", NO_OP, "elements kept in CPU memory with device nvme", _CPU_ONLY),
    Key(
        _P + "pin_memory",
        NO_OP,
        "CPU memory is page-locked, so copies can overlap",
        "always so here, where there is a GPU",
    ),
)
