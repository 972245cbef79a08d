"""Generate `config_values.json`: what DeepSpeed 0.19.8's config object says of a few configs.

Run manually where DeepSpeed is installed:
`DS_ACCELERATOR=cpu python -m tests.deepspeed.make_config_values NAME...`, names of attributes.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("config_values.json")
CONFIGS: list[dict[str, Any]] = [
    {"train_batch_size": 8},
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 7,
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "checkpoint": {"tag_validation": "Fail"},
    },
    {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 128},
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "memory_breakdown": True,
    },
]


def read_values(config: Any, names: list[str]) -> dict[str, Any]:
    """The attributes that are plain values."""
    values = {name: getattr(config, name, ...) for name in names}
    plain = (bool, int, float, str, list, type(None))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, plain) or (isinstance(value, dict) and name.endswith("_params"))
    }


if __name__ == "__main__":
    read = import_module("deepspeed.runtime.config").DeepSpeedConfig
    rows = [json.dumps(read_values(read(config), sys.argv[1:])) for config in CONFIGS]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")
