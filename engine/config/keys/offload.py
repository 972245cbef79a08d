"""Keys of `zero_optimization.offload_optimizer` and `zero_optimization.offload_param`."""

from __future__ import annotations

from rayzero.engine.config.keys.spec import IMPLEMENTED, NO_OP, REFUSED, Key

_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer."
_OFFLOAD_PARAM = "zero_optimization.offload_param."
_CPU_ONLY = "weights rest in CPU memory, not in files"

OFFLOAD_OPTIMIZER_KEYS = (
    Key(
        _OFFLOAD_OPTIMIZER + "device",
        IMPLEMENTED,
        "main weights and optimizer state rest here: none, cpu or nvme",
    ),
    Key(_OFFLOAD_OPTIMIZER + "nvme_path", IMPLEMENTED, "the folder for device nvme"),
    Key(
        _OFFLOAD_OPTIMIZER + "buffer_count",
        IMPLEMENTED,
        "pieces of the state in CPU memory at once, with device nvme",
    ),
    Key(
        _OFFLOAD_OPTIMIZER + "pin_memory",
        NO_OP,
        "CPU memory is page-locked, so copies can overlap",
        "always so here, where there is a GPU",
    ),
    Key(
        _OFFLOAD_OPTIMIZER + "pipeline_read",
        NO_OP,
        "the next piece is read while one is updated",
        "always so here",
    ),
    Key(
        _OFFLOAD_OPTIMIZER + "pipeline_write",
        NO_OP,
        "the last piece is written while one is updated",
        "always so here",
    ),
    Key(
        _OFFLOAD_OPTIMIZER + "fast_init",
        NO_OP,
        "files are made without writing zeros",
        "always so here",
    ),
    Key(_OFFLOAD_OPTIMIZER + "ratio", IMPLEMENTED, "the share of the elements that is offloaded"),
    Key(
        _OFFLOAD_OPTIMIZER + "super_offload",
        REFUSED,
        "an offload engine for superchips",
        "it is made for one kind of machine",
        "device: cpu",
    ),
    Key(
        _OFFLOAD_OPTIMIZER + "cpuadam_cores_perc",
        NO_OP,
        "the share of cores that steps the optimizer for super_offload",
        "it has a meaning with super_offload only",
    ),
)

OFFLOAD_PARAM_KEYS = (
    Key(
        _OFFLOAD_PARAM + "device",
        IMPLEMENTED,
        "shards of the weights rest here at stage 3: none or cpu",
    ),
    Key(_OFFLOAD_PARAM + "nvme_path", NO_OP, "the folder for device nvme", _CPU_ONLY),
    Key(_OFFLOAD_PARAM + "buffer_count", NO_OP, "buffers in CPU memory for device nvme", _CPU_ONLY),
    Key(_OFFLOAD_PARAM + "buffer_size", NO_OP, "elements of such a buffer", _CPU_ONLY),
    Key(
        _OFFLOAD_PARAM + "max_in_cpu",
        NO_OP,
        "elements kept in CPU memory with device nvme",
        _CPU_ONLY,
    ),
    Key(
        _OFFLOAD_PARAM + "pin_memory",
        NO_OP,
        "CPU memory is page-locked, so copies can overlap",
        "always so here, where there is a GPU",
    ),
)
