"""Keys of `zero_optimization.offload_optimizer` and `zero_optimization.offload_param`."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import NO_OP, REFUSED, Key

_O = "zero_optimization.offload_optimizer."
_P = "zero_optimization.offload_param."

OPTIMIZER = (
    Key(_O + "device", REFUSED, "main weights and optimizer state rest here: none, cpu or nvme"),
    Key(_O + "nvme_path", REFUSED, "the folder for device nvme"),
    Key(_O + "buffer_count", REFUSED, "buffers in CPU memory for device nvme"),
    Key(_O + "pin_memory", REFUSED, "CPU memory is page-locked, so copies can overlap"),
    Key(_O + "pipeline_read", REFUSED, "the next piece is read while one is updated"),
    Key(_O + "pipeline_write", REFUSED, "the last piece is written while one is updated"),
    Key(
        _O + "fast_init",
        NO_OP,
        "files are made without writing zeros",
        "always so here",
    ),
    Key(_O + "ratio", REFUSED, "the share of the elements that is offloaded"),
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
    Key(_P + "device", REFUSED, "shards of the weights rest here at stage 3: none, cpu or nvme"),
    Key(_P + "nvme_path", REFUSED, "the folder for device nvme"),
    Key(_P + "buffer_count", REFUSED, "buffers in CPU memory for device nvme"),
    Key(_P + "buffer_size", REFUSED, "elements of such a buffer"),
    Key(_P + "max_in_cpu", REFUSED, "elements kept in CPU memory with device nvme"),
    Key(_P + "pin_memory", REFUSED, "CPU memory is page-locked, so copies can overlap"),
)
