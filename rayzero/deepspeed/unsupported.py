"""Names of DeepSpeed that rayzero does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayzero.engine.errors import did_you_mean

_NO_INFERENCE = "a server for inference; rayzero trains"
_USE_STAGE_3 = "stage 3 (zero_optimization.stage), which shards models that do not fit"
_USE_STAGE_3_DATA_PARALLEL = "stage 3 (zero_optimization.stage): all ranks are data parallel"

ALTERNATIVES: Mapping[str, str] = {
    "deepspeed.init_inference": _NO_INFERENCE,
    "deepspeed.InferenceEngine": _NO_INFERENCE,
    "deepspeed.inference": _NO_INFERENCE,
    "deepspeed.DeepSpeedInferenceConfig": _NO_INFERENCE,
    "deepspeed.DeepSpeedHybridEngine": _NO_INFERENCE,
    "deepspeed.pipe": _USE_STAGE_3,
    "deepspeed.PipelineModule": _USE_STAGE_3,
    "deepspeed.PipelineEngine": _USE_STAGE_3,
    "deepspeed.moe": "experts as ordinary modules, on every rank",
    "deepspeed.module_inject": _USE_STAGE_3_DATA_PARALLEL,
    "deepspeed.tp_model_init": _USE_STAGE_3_DATA_PARALLEL,
    "deepspeed.sequence": _USE_STAGE_3_DATA_PARALLEL,
    "deepspeed.profiling": "engine.metrics, and torch.profiler",
    "deepspeed.monitor": "engine.metrics",
    "deepspeed.autotuning": "rayzero plan",
    "deepspeed.elasticity": "rayzero's jobs, whose worker count may change while they run",
    "deepspeed.launcher": "torchrun -m rayzero.deepspeed script.py, or rayzero run",
    "deepspeed.compression": "the config's compression keys (docs/config.md)",
    "deepspeed.DeepSpeedTransformerLayer": "torch.nn.TransformerEncoderLayer, or the model's own",
    "deepspeed.OnDevice": "deepspeed.zero.Init()",
    "deepspeed.DeepSpeedConfig": "rayzero.engine.config.parse_config",
    "deepspeed.utils.set_z3_leaf_modules": "rayzero.unshard_modules in the config",
    "deepspeed.zero.register_external_parameter": "nothing: a parameter belongs to the innermost "
    "block that contains all its uses",
    "deepspeed.zero.TiledLinear": "torch.nn.Linear under stage 3",
}


def unsupported_message(name: str, available: Iterable[str]) -> str:
    """The message for a name that rayzero does not have."""
    known = sorted(entry for entry in available if not entry.startswith("_"))
    if name in ALTERNATIVES:
        return f"{name} is not part of rayzero; use {ALTERNATIVES[name]}"
    hint = did_you_mean(name.rpartition(".")[2], known)
    return f"rayzero has no {name}{hint}; available: {', '.join(known)}"
