"""Keys about what a run tells: logs, timers, profilers, monitors."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED, Key, enabled

_MONITOR = "engine.metrics has them as numbers, for any logger"
_METRICS = "log engine.metrics from the script"

LOGS = (
    Key("steps_per_print", IMPLEMENTED, "rank 0 logs loss and lr every this many steps"),
    Key(
        "wall_clock_breakdown",
        NO_OP,
        "seconds of forward, backward and step are logged",
        "engine.metrics has a step's seconds and its exposed communication, always",
    ),
    Key(
        "memory_breakdown",
        NO_OP,
        "memory is logged at many places of a step",
        "engine.metrics has the bytes by class, always",
    ),
    Key(
        "dump_state",
        NO_OP,
        "the config is printed at the start",
        "`rayzero config explain` prints it",
    ),
    Key(
        "log_level",
        NO_OP,
        "the level of DeepSpeed's logger",
        'logging.getLogger("rayzero").setLevel sets ours',
    ),
    Key(
        "timers.throughput.enabled",
        NO_OP,
        "samples a second are measured",
        "engine.metrics has a step's seconds, always",
    ),
    Key(
        "timers.throughput.synchronized",
        NO_OP,
        "the device is waited for to measure them",
        "a step ends with the vote on its gradient, which waits for the device anyway",
    ),
)

MONITORS = (
    Key(
        "comms_logger",
        REFUSED,
        "every collective is logged",
        "engine.metrics counts calls, bytes and exposed seconds by collective, always",
        "engine.metrics",
        asks=enabled,
    ),
    Key(
        "flops_profiler",
        REFUSED,
        "operations of each module are counted",
        use="torch.utils.flop_counter.FlopCounterMode around the model",
        asks=enabled,
    ),
    Key("tensorboard", REFUSED, "losses go to TensorBoard", _MONITOR, _METRICS, asks=enabled),
    Key("wandb", REFUSED, "losses go to Weights & Biases", _MONITOR, _METRICS, asks=enabled),
    Key("csv_monitor", REFUSED, "losses go to CSV files", _MONITOR, _METRICS, asks=enabled),
    Key("comet", REFUSED, "losses go to Comet", _MONITOR, _METRICS, asks=enabled),
)
