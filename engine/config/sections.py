"""DeepSpeed's sections for dtypes, activation checkpointing, timers, checkpoints, aio and the
compiler, and the section `rayzero`, which DeepSpeed does not have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import (
    ConfigSection,
    DtypeName,
    FiniteFloat,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    name_validator,
)
from rayzero.engine.config.keys import Auto, implemented

_TAG_VALIDATIONS = {name.lower(): name for name in ("Ignore", "Warn", "Fail")}
_AUTO_ENABLED = "the default of transformers' TrainingArguments; set true to train in"


class Fp16Config(ConfigSection, path="fp16"):
    """float16 model weights with fp32 main weights and a scaled loss."""

    enabled: bool = implemented(
        False,
        "float16 weights with fp32 main weights and a scaled loss",
        group="fp16",
        auto=Auto(False, f"{_AUTO_ENABLED} fp16"),
    )
    auto_cast: bool = implemented(
        False, "the model's floating-point inputs are cast to float16; otherwise they are unchanged"
    )
    loss_scale: NonNegativeFloat = implemented(0.0, "static loss scale; 0: dynamic")
    initial_scale_power: Integer = implemented(16, "a dynamic scale starts at 2 to this power")
    # The keys below apply to a dynamic scale only. They are checked only there (`checks.py`): with
    # a static scale, DeepSpeed does not read them.
    loss_scale_window: Integer = implemented(
        1000, "steps without overflow after which the scale is doubled"
    )
    hysteresis: Integer = implemented(2, "overflows tolerated before the scale is halved")
    consecutive_hysteresis: bool = implemented(
        False, "a step without overflow resets the hysteresis"
    )
    min_loss_scale: FiniteFloat = implemented(1.0, "lower bound of a dynamic scale")

    def initial_dynamic_scale(self) -> int:
        """Returns the value at which a dynamic scale starts."""
        return 1 << self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Returns a dynamic scale's settings, under the names of DeepSpeed's loss scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class Bf16Config(ConfigSection, path="bf16"):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = implemented(
        False,
        "bfloat16 weights with fp32 main weights",
        group="bf16",
        auto=Auto(False, f"{_AUTO_ENABLED} bf16"),
    )
    bf16_master_weights_and_grads: bool = implemented(
        False,
        "main weights and main grads are in bfloat16 too, and the model's weights are the main "
        "weights: updates below a 256th of a weight are lost; stages 1 to 3, with "
        "bf16_optimizer_states or offload_optimizer, as in DeepSpeed",
    )
    bf16_optimizer_states: bool = implemented(
        False, "optimizer state in bfloat16; with bf16_master_weights_and_grads only"
    )


class TorchAutocastConfig(ConfigSection, path="torch_autocast"):
    """`torch.autocast` around the model's forward; weights keep their dtype."""

    enabled: bool = implemented(
        False, "`torch.autocast` around the model's forward", group="other dtypes"
    )
    dtype: DtypeName = implemented("bf16", "the dtype that autocast computes in")


class DataTypesConfig(ConfigSection, path="data_types"):
    """Dtypes other than the model weights'; None for the default of the precision."""

    grad_accum_dtype: DtypeName | None = implemented(
        None, "the dtype in which gradients are accumulated", group="other dtypes"
    )
    buffer_dtype: DtypeName | None = implemented(
        None, "the dtype of the model's floating-point buffers; by default they keep their own"
    )


class ActivationCheckpointingConfig(ConfigSection, path="activation_checkpointing"):
    """Options of `checkpointing.checkpoint`; they have no effect where it is not called."""

    cpu_checkpointing: bool = implemented(
        False,
        "checkpoints are kept in CPU memory, if checkpointing.configure got the config",
        group="activation checkpointing",
    )


class ThroughputConfig(ConfigSection, path="timers.throughput"):
    """The timer of samples per second."""


class TimersConfig(ConfigSection):
    """DeepSpeed's timers."""

    throughput: ThroughputConfig = ThroughputConfig()


class ParallelWriteConfig(ConfigSection, path="checkpoint.parallel_write"):
    """Ranks that write a checkpoint concurrently."""


class CheckpointConfig(ConfigSection, path="checkpoint"):
    """DeepSpeed's checkpoint options."""

    tag_validation: Annotated[
        str, BeforeValidator(name_validator(_TAG_VALIDATIONS, "a validation of tags"))
    ] = implemented(
        "Warn",
        "what happens if ranks save under different tags. Fail: an error. Warn: a warning, and "
        "rank 0's tag is used, so that there is one complete checkpoint. Ignore: the same without "
        "the warning",
        group="checkpoints",
    )
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()


class AioConfig(ConfigSection, path="aio"):
    """DeepSpeed's NVMe I/O."""


class CompileConfig(ConfigSection, path="compile"):
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
        "the same as compile.enabled, with a line in the log: torch.compile is used, without "
        "DeepCompile's ZeRO inside the graph",
    )


class CompressionConfig(ConfigSection):
    """Compression of gradients between ranks."""

    gradients: Literal["none", "fp16", "bf16", "int8", "sign", "lowrank"] = implemented(
        "none",
        "how gradients are encoded. none: unchanged; fp16, bf16: rounded; int8: 8 bits per value "
        "and a scale per block; sign: one bit per value; lowrank: factors of every matrix "
        "(PowerSGD)",
    )
    block_size: Annotated[PositiveInt, Field(multiple_of=32)] | None = implemented(
        None, "values that share a scale; by default 256 with int8, 64 with sign"
    )
    rank: PositiveInt = implemented(4, "rank of the factors of lowrank")
    error_feedback: bool | None = implemented(
        None,
        "the error of the encoding is added to the next gradients; always with sign and lowrank, "
        "by default not with the others",
    )


class LoaderConfig(ConfigSection):
    """How the loader of `training_data` makes samples."""

    num_workers: NonNegativeInt = implemented(
        0,
        "processes of each rank that make samples: they read a map-style dataset's items, or run "
        "the `transform` of a stream or an iterable. 0: the thread that reads ahead makes them. In "
        "a process, a sample's random numbers (`random`, `numpy.random`, torch on the CPU) are "
        "seeded by the job's seed and the sample's position",
    )
    sample_timeout_s: PositiveFloat = implemented(
        600.0,
        "how long making one sample may take; after that the sample is bad, and its process is "
        "ended",
    )
    start_timeout_s: PositiveFloat = implemented(
        600.0, "how long a process may take to start and import; after that it is an error"
    )
    max_bad_samples: NonNegativeInt = implemented(
        0,
        "samples of a job, over all ranks and restarts, that may raise, hang, or end their "
        "process: they are left out as if their loss were 0. The next such sample ends the "
        "training, with an error that names it",
    )


class RayzeroConfig(ConfigSection, path="rayzero"):
    """Keys that DeepSpeed does not have."""

    unshard_modules: tuple[str, ...] = implemented(
        (),
        "class names of the modules gathered as one unit at stage 3; by default the elements of "
        "every ModuleList and Sequential",
        group="rayzero",
        old_names=("rayzero.unit_classes",),
    )
    unshard_min_numel: NonNegativeInt = implemented(
        1_000_000,
        "at stage 3, a module in no block that owns at least this many elements (an embedding, a "
        "head) is gathered on its own; 0: never",
    )
    reshard_after_forward: bool = implemented(
        True,
        "at stage 3, weights are released after forward and gathered again for backward; false: "
        "gathered once a step, and kept in memory",
    )
    gather_buffers: Annotated[PositiveInt, Field(ge=2)] = implemented(
        2,
        "buffers for gathered weights at stage 3: how many units can be gathered at once",
        old_names=("rayzero.slots",),
    )
    unused_gradients: Literal["zero", "none"] = implemented(
        "zero",
        "what happens to a parameter, such as an expert's, that no rank used in a step. zero: it "
        "gets a gradient of zeros, as in DeepSpeed: momentum and weight decay continue. none: as "
        "in PyTorch, the parameter and its optimizer state do not change; steps that an optimizer "
        "counts (Adam's bias correction) continue",
    )
    other_optimizer_state: Literal["error", "reset"] = implemented(
        "error",
        "what happens to a saved optimizer state of another kind than this optimizer's, such as "
        "Adam's for SGD. error: it is refused. reset: it is left out, with a warning, and the "
        "optimizer starts without state; weights, step and data continue",
    )
    reduce_each_micro_step: bool = implemented(
        True,
        "gradients are reduced into shards in every micro-step at stages 2 and 3; false: every "
        "rank accumulates all of them, as at stage 1, and they are reduced once a step, which "
        "costs the memory of the main gradients of the whole model (see `rayzero plan`)",
    )
    peak_flops: PositiveFloat | None = implemented(
        None,
        "peak flop/s of one device, for mfu; known for the usual GPUs. Flops are counted in the "
        "second micro-step, or with torch.compile estimated from the sizes of model and batch",
    )
    compression: CompressionConfig = CompressionConfig()
    loader: LoaderConfig = LoaderConfig()
