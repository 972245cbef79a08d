"""`autotuning`: how `rayzero launch --autotuning` chooses stage and micro-batch by short runs."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rayzero.engine.config.fields import ConfigSection, PositiveInt
from rayzero.engine.config.keys import implemented


class AutotuningConfig(ConfigSection, path="autotuning"):
    """DeepSpeed's autotuning, without its search over bucket sizes."""

    enabled: bool = implemented(
        False,
        "the other keys apply to `rayzero launch --autotuning tune|run`, which chooses stage and "
        "micro-batch; a run without that option trains with the config as it is",
        group="autotuning",
    )
    metric: Literal["throughput", "latency", "flops"] = implemented(
        "throughput",
        "the measure by which tries are compared. throughput: samples per second; latency: seconds "
        "per step; flops: flop/s of a rank, which are known where rayzero.peak_flops is",
    )
    start_profile_step: PositiveInt = implemented(3, "the first step of a try that is timed")
    end_profile_step: PositiveInt = implemented(5, "the last step of a try")
    min_train_batch_size: PositiveInt = implemented(1, "smallest global batch that is tried")
    max_train_batch_size: PositiveInt | None = implemented(
        None, "largest global batch that is tried"
    )
    min_train_micro_batch_size_per_gpu: PositiveInt = implemented(
        1, "smallest micro-batch that is tried"
    )
    max_train_micro_batch_size_per_gpu: PositiveInt = implemented(
        1024, "largest micro-batch that is tried"
    )
    num_tuning_micro_batch_sizes: PositiveInt = implemented(
        3,
        "number of micro-batches tried at each stage, each twice the one before: the largest that "
        "fit by estimate, or on a CPU, for which there is no estimate, the smallest",
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = implemented(
        "gridsearch",
        "order of the tries: by stage and micro-batch, or random. Every order leaves out what does "
        "not fit by the planner's estimate",
    )
    tuner_early_stopping: PositiveInt = implemented(
        5, "tuning ends after this many tries in a row that were no better"
    )
    tuner_num_trials: PositiveInt = implemented(50, "the largest number of tries")
    arg_mappings: dict[str, str] | None = implemented(
        None,
        "arguments of the script that hold train_micro_batch_size_per_gpu and "
        "gradient_accumulation_steps; by default --KEY, and the "
        "arguments of transformers' Trainer, if the command line has them",
    )
    results_dir: str = implemented(
        "autotuning_results", "folder of the table, the best config, and the command that uses it"
    )
    exps_dir: str = implemented("autotuning_exps", "folder of each try's result, log and journal")
    overwrite: bool = implemented(True, "false: a try with a result in exps_dir is not repeated")

    @model_validator(mode="after")
    def _check_order(self) -> AutotuningConfig:
        if self.end_profile_step < self.start_profile_step:
            raise ValueError("end_profile_step must not be less than start_profile_step")
        least = self.min_train_micro_batch_size_per_gpu
        if least > self.max_train_micro_batch_size_per_gpu:
            raise ValueError(f"max_train_micro_batch_size_per_gpu must be at least {least}")
        return self
