"""Runs scripts of this folder one after the other in one process per rank: their imports cost more
than they do. `together.py FOLDER [SCRIPT...]`; prints `NAME {"losses": ...}` for each run.

Between two scripts, what accelerate and transformers keep per process is reset.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
TRAINER = ["--use_cpu", "--ddp_backend", "gloo", "--report_to", "none", "--disable_tqdm", "true"]
TRAINER += ["--logging_steps", "1", "--per_device_train_batch_size", "4", "--output_dir", "{out}"]
FLAT = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")


def config(stage: int, **more: object) -> dict:
    """As in transformers' documentation: sizes "auto"."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero |= {"reduce_bucket_size": "auto"}
    if stage == 3:
        names = ("prefetch_bucket_size", "param_persistence_threshold")
        zero |= {f"stage3_{name}": "auto" for name in names}
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    accumulation = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    return {**FLAT, **accumulation, "zero_optimization": zero, "steps_per_print": 2000, **more}


FILES = {
    "zero0": config(0),
    "zero1": config(1),
    "zero3_torch": config(3),  # optimizer and schedule are Trainer's
    "zero2": config(2, optimizer=ADAMW, bf16={"enabled": "auto"}, fp16={"enabled": "auto"}),
    "zero3": config(
        3,
        optimizer=ADAMW,
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(SCHEDULE, "auto")},
    ),
    "gan": {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.5, 0.999], "eps": 1e-8}},
    },
    "megatron": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {"partition_activations": False},
    },
}
DS = ["--deepspeed", "{configs}/zero%d.json"]


def trainer(stage: int | str, *more: str) -> list[str]:
    return [*TRAINER, "--deepspeed", f"{{configs}}/zero{stage}.json", *more]


CLM = trainer(3, "--do_train", "--do_eval", "--eval_strategy", "steps", "--eval_steps", "4")
SHORT = ("--max_steps", "4", "--save_strategy", "no", "--bf16", "false")
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")
GRPO = ("--num_generations", "4", "--max_completion_length", "8", "--learning_rate", "1e-2")
RUNS: dict[str, list[tuple[str, ...] | list[str]]] = {
    "check_equal": [("{out}",)],
    "ds_cifar": [("--stage", "1"), ("--stage", "2", "--dtype", "bf16"), ("--stage", "3")],
    "ds_bert": [
        ("--checkpoint_dir", "{out}"),
        ("--checkpoint_dir", "{out}", "--load_checkpoint_dir", "{out}", "--num_iterations", "14"),
    ],
    "ds_gan": [("--deepspeed_config", "{configs}/gan.json")],
    "ds_zero3_generate": [("--folder", "{out}")],
    "ds_megatron": [
        ("--deepspeed", "--deepspeed_config", "{configs}/megatron.json", "--save", "{out}"),
        tuple((
            "--deepspeed_config {configs}/megatron.json --save {out} --load {out} --train-iters "
            "14"
        ).split()),
    ],
    "hf_run_clm": [
        [*CLM, "--max_steps", "6", "--save_steps", "4", "--gradient_checkpointing"],
        [*CLM, "--max_steps", "8", "--save_steps", "4"],
    ],
    "hf_run_glue": [
        trainer(2, "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3",
                "--eval_strategy", "steps", "--eval_steps", "3", "--load_best_model_at_end",
                "--metric_for_best_model", "accuracy", "--bf16"),
    ],
    "accelerate_complete": [
        ("--stage", "2", "--output_dir", "{out}"),
        ("--stage", "2", "--output_dir", "{out}", "--resume_from_checkpoint", "{out}/step_6"),
        ("--config", "{configs}/zero3.json", "--output_dir", "{out}"),
    ],
    "trl_sft": [trainer(2, *SHORT), trainer(3, *SHORT, *LORA, "--learning_rate", "1e-2")],
    "trl_dpo": [trainer(3, *SHORT), trainer(2, *SHORT, *LORA)],
    "trl_grpo": [
        trainer(2, *SHORT, *GRPO),
        trainer(3, *SHORT, *GRPO, "--beta", "0.1"),
        trainer(1, *SHORT, *GRPO),
        trainer(0, *SHORT, *GRPO),
    ],
    "trl_online_dpo": [
        trainer(stage, *SHORT, "--max_new_tokens", "8", "--learning_rate", "1e-2")
        for stage in (2, "3_torch")
    ],
    "trl_reward": [*(trainer(stage, *SHORT) for stage in (0, 1, 2, "3_torch"))],
    "peft_lora": [("--stage", "2", "--output_dir", "{out}"), ("--output_dir", "{out}")],
    "llava_like": [
        ("--deepspeed", "{configs}/zero3.json", "--output_dir", "{out}", "--backend", "gloo",
         "--tune_mm_mlp_adapter"),
    ],
    "accelerate_nlp": [()],  # the last: it ends the process group
}  # fmt: skip


def reset() -> None:
    """What the libraries keep per process: accelerate's state, transformers' config, variables."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()
    gc.freeze()  # excludes imported modules: a collection, of which libraries make many, took 0.5 s
    gc.enable()


def run(name: str, arguments: list[str]) -> str:
    """The last line that the script printed, which is empty on other ranks than 0."""
    sys.argv = [f"{name}.py", *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    lines = [line for line in printed.getvalue().splitlines() if line.startswith('{"losses"')]
    return lines[-1] if lines else ""


def main(folder: Path, names: list[str]) -> None:
    configs = folder / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    for name, document in FILES.items():
        new = configs / f"{name}.{rank}"
        new.write_text(json.dumps(document))
        new.replace(configs / f"{name}.json")
    sys.path.insert(0, str(HERE))
    if "DS_ACCELERATOR" in os.environ:  # the real DeepSpeed on CPUs, else it counts one rank
        import deepspeed

        deepspeed.init_distributed("gloo")
    gc.disable()  # while libraries are imported, until the first `reset`
    for name in names or RUNS:
        out = folder / name
        out.mkdir(exist_ok=True)
        for arguments in RUNS[name]:
            started_s = time.monotonic()
            words = [word.format(out=out, configs=configs) for word in arguments]
            try:
                line = run(name, words)
            except BaseException:  # noqa: BLE001  whatever it is, the rank must end
                traceback.print_exc()
                print(f"FAILED {name} {arguments}", file=sys.stderr, flush=True)
                os._exit(1)  # the other ranks may wait for this one in a collective
            if line:
                print(name, line, f"{time.monotonic() - started_s:.1f} s", flush=True)
            reset()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
