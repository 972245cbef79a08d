"""The arguments of DeepSpeed-Chat's scripts, as changes of the job files beside this.

`deepspeed_chat.toml` lists them all: which key of the job file each sets, why it has no effect, or
why it is refused. The functions here are for those that depend on one another.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rayzero import ConfigError

HERE = Path(__file__).parent
Document = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One of DeepSpeed-Chat's training scripts.

    Attributes:
        script: its folder there, and its name on the command line here.
        models: the folder that it writes to, in the output folder.
        job: its job file here.
        engines: that train: the key of each one's config in the job file, by what the names of its
            arguments begin with.
    """

    script: str
    models: str
    job: str
    engines: Mapping[str, str]


STEPS = {
    "sft": Step("step1_supervised_finetuning", "actor-models", "sft.yaml", {"": "engine"}),
    "reward": Step("step2_reward_model_finetuning", "reward-models", "reward.yaml", {"": "engine"}),
    "dpo": Step("step2_dpo_finetuning", "dpo-models", "dpo.yaml", {"": "engine"}),
    "ppo": Step(
        "step3_rlhf_finetuning",
        "step3-models",
        "ppo.yaml",
        {"actor_": "engine", "critic_": "args.critic"},
    ),
}
REFERENCE = "args.reference"
"""The key of the config of the engine that only evaluates, in DPO and PPO."""


@cache
def arguments(script: str) -> dict[str, Document]:
    """The arguments of one script, `e2e` or a key of `STEPS`, by name."""
    listed = tomllib.loads((HERE / "deepspeed_chat.toml").read_text())
    return {name: row for name, row in listed.items() if script in row["default"]}


def make_parser(script: str, program: str) -> argparse.ArgumentParser:
    """A parser of a script's arguments. What is not given is missing from its result."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    for name, row in arguments(script).items():
        default = row["default"][script]
        options: Document = {"help": _describe(row), "default": argparse.SUPPRESS, "dest": name}
        if default is False:
            options["action"] = "store_true"
        else:
            sample = default[0] if isinstance(default, list) and default else default
            named = {"int": int, "float": float}.get(row.get("type", ""))
            options["type"] = named or (str if isinstance(sample, list) else type(sample))
            options["choices"] = row.get("choices")
            options["nargs"] = "*" if isinstance(default, list) else None
            options["metavar"] = None if "choices" in row else name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", **options)
    return parser


def _describe(row: Document) -> str:
    for status in ("refused", "ignored"):
        if status in row:
            return f"{row['help']} ({status}: {row[status]})".replace("%", "%%")
    return str(row["help"])


def check_refused(script: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError if an argument is given that is refused, with another value than the one
    that changes nothing."""
    for name, row in arguments(script).items():
        default = row["default"][script]
        value = given.get(name, default)
        if "refused" in row and value not in (default, row.get("off", default)):
            shown = "" if value is True else f" {value}"
            allowed = row.get("off", default)
            raise ConfigError(
                f"--{name}{shown}: {row['refused']}",
                allowed=f"--{name} {allowed}" if allowed not in ("", False, []) else "",
                fix=f"leave out --{name}",
            )


def apply_arguments(key: str, given: Mapping[str, Any], job: Document, questions: int) -> Document:
    """Changes a step's job file by arguments of its script.

    Args:
        key: of the step, in `STEPS`.
        given: the arguments' values, by name.
        job: the contents of the job file; it is changed, and returned.
        questions: how many there are to train on.

    Raises:
        ConfigError: an argument is refused, or does not fit the others.
    """
    check_refused(key, given)
    for name, row in arguments(key).items():
        paths = row.get("sets", [])
        paths = paths[key] if isinstance(paths, dict) else paths
        for path in [paths] if isinstance(paths, str) else paths:
            if name in given:
                set_value(job, path, given[name])
    configs = {prefix: find(job, path) for prefix, path in STEPS[key].engines.items()}
    reference = find(job, REFERENCE) if "reference" in job.get("args", {}) else None
    everyone = [*configs.values()] + ([reference] if reference is not None else [])
    _set_batches(given, job, everyone)
    _set_length(given, job, questions)
    for prefix, config in configs.items():
        _set_schedule(prefix, given, config, job["steps"])
        _set_offload(given, config)
    if given.get("offload_reference_model"):
        _offload_reference(key, reference or {})
    for config in everyone:
        _set_precision(given, config)
    _set_monitors(key, given, configs)
    return job


def find(document: Document, path: str) -> Document:
    """The section at a path such as `args.critic`; made if it is missing."""
    for name in path.split("."):
        document = document.setdefault(name, {})
    return document


def set_value(document: Document, path: str, value: Any) -> None:
    """Sets the key at a path."""
    section, _, name = path.rpartition(".")
    (find(document, section) if section else document)[name] = value


def _set_batches(given: Mapping[str, Any], job: Document, configs: Sequence[Document]) -> None:
    """The samples of a step follow from those of each worker; they stay what they are when workers
    come and go, and with them losses and learning rates."""
    names = ("per_device_train_batch_size", "per_device_training_batch_size")
    each = next((given[name] for name in names if name in given), None)
    micro_steps = given.get("gradient_accumulation_steps")
    workers = job.get("workers", {})
    for config in configs:
        if each is not None:
            most = workers.get("max") or workers.get("min", 1)
            config["train_batch_size"] = each * most * (micro_steps or 1)
        if micro_steps is not None:
            config["gradient_accumulation_steps"] = micro_steps
    if "generation_batches" in given:
        set_value(job, "rollouts.max_version_lag", given["generation_batches"] - 1)


def _set_length(given: Mapping[str, Any], job: Document, questions: int) -> None:
    if "num_train_epochs" in given:
        samples = questions * job.get("rollouts", {}).get("group", 1)
        per_step = job["engine"]["train_batch_size"]
        job["steps"] = -(-samples * given["num_train_epochs"] // per_step)
    if given.get("enable_test_mode"):
        job["steps"] = given.get("test_stop_step", 0)
        if job["steps"] < 1:
            raise ConfigError("--enable_test_mode without --test_stop_step", allowed="1 or more")


def _set_schedule(prefix: str, given: Mapping[str, Any], config: Document, steps: int) -> None:
    """The learning rate of one engine, and its curve: of the type that is given, or else the one of
    the job file."""
    params = find(config, "optimizer.params")
    params["lr"] = lr = given.get(f"{prefix}learning_rate", params.get("lr"))
    warmup = given.get("num_warmup_steps")
    if "lr_scheduler_type" in given:
        config.pop("scheduler", None)
        schedule = make_schedule(given["lr_scheduler_type"], lr, warmup or 0, steps)
        config |= {} if schedule is None else {"scheduler": schedule}
    elif "scheduler" in config:
        curve = config["scheduler"].setdefault("params", {})
        curve |= {"warmup_max_lr": lr} if "warmup_max_lr" in curve else {}
        curve |= {} if warmup is None else {"warmup_num_steps": warmup}
        curve |= {"total_num_steps": steps} if "total_num_steps" in curve else {}


def make_schedule(kind: str, lr: float, warmup: int, steps: int) -> Document | None:
    """The `scheduler` section for a curve of transformers' `get_scheduler`; None: a constant rate.
    With a warmup, which begins with two steps at 0, it is one step later than transformers'."""
    growing = {"warmup_num_steps": warmup, "warmup_max_lr": lr, "warmup_type": "linear"}
    if kind == "constant" or (kind == "constant_with_warmup" and not warmup):
        return None
    if kind == "constant_with_warmup":
        return {"type": "WarmupLR", "params": growing}
    if kind == "linear" and not warmup:
        falling = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps}
        return {"type": "LinearLR", "params": falling}
    if kind == "linear":
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **growing}}
    if kind in ("cosine", "cosine_with_restarts") and not warmup:  # the script asks for one cycle
        return {"type": "CosineAnnealingLR", "params": {"T_max": steps}}
    if kind in ("cosine", "cosine_with_restarts"):
        curve = {"total_num_steps": steps, "warmup_num_steps": warmup, "cos_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": curve | {"warmup_type": "linear"}}
    raise ConfigError(
        f"--lr_scheduler_type {kind}: transformers ends it at 1e-7, with power 1",
        allowed="linear, cosine, cosine_with_restarts, constant, constant_with_warmup",
        fix="--lr_scheduler_type linear, which ends at 0",
    )


def _set_offload(given: Mapping[str, Any], config: Document) -> None:
    if given.get("offload"):
        zero = find(config, "zero_optimization")
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero.get("stage") == 3:
            zero["offload_param"] = {"device": "cpu"}


def _offload_reference(key: str, reference: Document) -> None:
    zero = find(reference, "zero_optimization")
    if zero.get("stage") != 3:
        stage = "--actor_zero_stage" if key == "ppo" else "--zero_stage"
        raise ConfigError(
            f"--offload_reference_model at stage {zero.get('stage', 0)}: weights can be in host "
            "memory at stage 3 only",
            allowed=f"{stage} 3",
            fix=f"{stage} 3, or leave out --offload_reference_model",
        )
    zero["offload_param"] = {"device": "cpu"}


def _set_precision(given: Mapping[str, Any], config: Document) -> None:
    sections = {"fp16": {"enabled": True, "loss_scale_window": 100}, "bf16": {"enabled": True}}
    if "dtype" in given:
        for name in sections:
            config.pop(name, None)
        config[given["dtype"]] = sections[given["dtype"]]


def _set_monitors(key: str, given: Mapping[str, Any], configs: Mapping[str, Document]) -> None:
    """Event files for TensorBoard in DeepSpeed-Chat's folders, and a message after each step."""
    listed = arguments(key)["tensorboard_path"]["default"][key]
    folder, number = given.get("tensorboard_path", listed), STEPS[key].script.split("_")[0]
    for prefix, config in configs.items():
        if given.get("enable_tensorboard"):
            name = f"{number}_{prefix or 'model_'}tensorboard"
            path = f"{folder}/ds_tensorboard_logs/"
            config["tensorboard"] = {"enabled": True, "output_path": path, "job_name": name}
        if given.get("print_loss"):
            config["steps_per_print"] = 1
