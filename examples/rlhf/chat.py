"""DeepSpeed-Chat's steps, one after the other, each a rayzero job.

    python -m examples.rlhf.chat --step 1 2 3 --actor-zero-stage 2 --output-dir out
    python -m examples.rlhf.chat --step 3 --print-config                  # the job file
    python -m examples.rlhf.chat step2_dpo_finetuning --beta 0.2 --model_name_or_path ...

The first form has the arguments of its `e2e_rlhf.py`, the others those of each script in its folder
`training` (`deepspeed_chat.toml`). A step that has been done is not done again: the same command
continues where it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import rayzero
from examples.rlhf.arguments import (
    HERE,
    STEPS,
    Document,
    apply_arguments,
    make_parser,
    set_value,
)
from examples.rlhf.task import Questions, question
from rayzero import ConfigError

PROGRAM = "python -m examples.rlhf.chat"
CHAIN = {1: "sft", 2: "reward", 3: "ppo"}
SIZES: dict[str, Document] = {"tiny": {}, "small": {"layers": 4, "width": 128}}
"""The fields of a `ModelConfig`, in place of the sizes of facebook/opt."""


def main(words: Sequence[str], run: Callable[[Document], object]) -> None:
    """Does what the command line asks for; `run` runs the contents of one job file."""
    scripts = {step.script: key for key, step in STEPS.items()}
    key = scripts.get(words[0]) if words else None
    given, print_only = parse(key or "e2e", words[1:] if key else words)
    if key is not None:
        jobs = [(key, make_job(key, given, {}))]
    else:
        chain = [CHAIN[number] for number in given.get("step", CHAIN)]
        jobs = [(step, make_job(step, *arguments_of(step, given))) for step in chain]
    for step, job in jobs:
        if print_only:
            print(yaml.safe_dump(job, sort_keys=False, explicit_start=True))
        else:
            check_models(step, job)
            run(job)


def parse(script: str, words: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The given arguments of a script by their names, and whether to print only."""
    parser = make_parser(
        script, f"{PROGRAM} {STEPS[script].script}" if script in STEPS else PROGRAM
    )
    own = "print the job files and run nothing (DeepSpeed-Chat does not have it)"
    parser.add_argument("--print-config", action="store_true", help=own)
    given = vars(parser.parse_args(words))
    return given, given.pop("print_config")


def arguments_of(key: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Document]:
    """The arguments of one step's script that follow from those of `e2e_rlhf.py`, and what it
    changes in the job file beside them."""
    actor, reward = given.get("actor-model", "tiny"), given.get("reward-model", "tiny")
    if actor not in SIZES:
        raise ConfigError(
            f"--actor-model {actor}: the models are made here, and nothing is downloaded",
            allowed=", ".join(SIZES),
            fix="add its shape to SIZES in chat.py",
        )
    output = Path(given.get("output-dir", "output")).absolute()
    sizes = {"sft": actor, "reward": reward, "ppo": actor}
    folders = {name: str(output / STEPS[name].models / size) for name, size in sizes.items()}
    more: dict[str, Any] = {"output_dir": folders[key]}
    stages = {"actor_zero_stage": given.get("actor-zero-stage")}
    stages["critic_zero_stage"] = given.get("reward-zero-stage")
    if key == "ppo":
        more["actor_model_name_or_path"] = folders["sft"]
        more["critic_model_name_or_path"] = folders["reward"]
    elif key == "reward":
        more["model_name_or_path"] = folders["sft"]
        stages = {"zero_stage": stages["critic_zero_stage"]}
    else:
        stages = {"zero_stage": stages["actor_zero_stage"]}
    more |= {name: stage for name, stage in stages.items() if stage is not None}
    changes: Document = {"name": f"rlhf-{key}-{sizes[key]}"}
    changes |= {"checkpoint.path": str(output / "runs"), "checkpoint.every_steps": 50}
    if key == "sft":
        changes["args.model"] = SIZES[actor]
    if "deployment-type" in given:
        changes |= workers_of(given["deployment-type"])
    return more, changes


def workers_of(deployment: str) -> Document:
    """The keys of `workers` for one device, those of this machine, or those of the cluster."""
    devices = torch.cuda.device_count()
    most = {"single_gpu": 1, "single_node": devices or 2}.get(deployment)
    if most is None:
        raise ConfigError(
            f"--deployment-type {deployment}: a job takes workers wherever its cluster has them",
            allowed="single_gpu, single_node",
            fix="write the job file with --print-config, set `workers`, and `rayzero run` it",
        )
    return {"workers.min": 1, "workers.max": most, "workers.gpus": min(devices, 1)}


def make_job(key: str, given: Mapping[str, Any], changes: Mapping[str, Any]) -> Document:
    """The contents of a step's job file with `changes`, values by the path of their key, and then
    with the given arguments of its script."""
    job: Document = yaml.safe_load((HERE / STEPS[key].job).read_text())
    for path, value in changes.items():
        set_value(job, path, value)
    return apply_arguments(key, given, job, len(Questions(question)))


def check_models(key: str, job: Document) -> None:
    """Raises ConfigError if a model that a step begins with was not trained."""
    for name in ("model", "actor_model", "critic_model"):
        folder = job["args"].get(f"{name}_name_or_path")
        if folder is not None and not (Path(folder) / "model.safetensors").exists():
            number = 2 if name == "critic_model" else 1
            raise ConfigError(
                f"{STEPS[key].script}: there is no model in {folder}",
                fix=f"train it: {PROGRAM} --step {number} with the same other arguments",
            )


def run_job(job: Document) -> object:
    """Runs a job file's contents to its end. Raises JobFailedError, ConfigError."""
    roles = {name: rayzero.Role(**role) for name, role in job.get("roles", {}).items()}
    return rayzero.Job(**job | {"roles": roles}).run()


if __name__ == "__main__":
    try:
        main(sys.argv[1:], run_job)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
