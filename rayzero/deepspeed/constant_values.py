"""DeepSpeed's constants that scripts import, by their names there."""

from __future__ import annotations

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND = "nccl", "gloo", "mpi"
CCL_BACKEND, SCCL_BACKEND, HCCL_BACKEND = "ccl", "sccl", "hccl"

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "lion", "muon"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER),
    *(MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
]
TORCH_ADAM_PARAM, ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "torch_adam", "adam_w_mode", True

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_num_steps", "warmup_type"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


def __getattr__(name: str) -> timedelta:
    if name == "default_pg_timeout":  # as the environment is when it is asked for
        return timedelta(minutes=int(os.getenv("DEEPSPEED_TIMEOUT", "10")))
    raise AttributeError(name)
