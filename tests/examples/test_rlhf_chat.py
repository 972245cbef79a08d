"""DeepSpeed-Chat's arguments and chain of folders over the jobs of `examples/rlhf`."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rayzero
from examples.rlhf import chat
from examples.rlhf.arguments import HERE, STEPS, apply_arguments, arguments, find, make_schedule
from rayzero import ConfigError
from rayzero.engine.config import parse_config
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.optim.deepspeed_schedules import StepSchedule
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.local_cluster import LocalCluster
from tests.house.blocks import blocks

QUESTIONS = 6400
LAUNCHER = {"deepspeed", "deepspeed_config", "deepscale", "deepscale_config"}
SAMPLES: dict[str, list[str]] = {  # values that change something
    "step": ["3"],
    "actor-model": ["small"],
    "reward-model": ["small"],
    "deployment-type": ["single_gpu"],
    "lr_scheduler_type": ["linear"],
    "tensorboard_path": ["events"],
    "test_stop_step": ["7"],
    "generation_batches": ["3"],
    "num_train_epochs": ["2"],
    "per_device_train_batch_size": ["24"],
    "per_device_training_batch_size": ["24"],
}
BESIDE = {  # arguments without which others have no effect
    "tensorboard_path": ["--enable_tensorboard"],
    "test_stop_step": ["--enable_test_mode"],
    "enable_test_mode": ["--test_stop_step", "7"],
    "offload_reference_model": ["--zero_stage", "3"],
}
PAIRS = [(script, name) for script in (*STEPS, "e2e") for name in arguments(script)]


def make_jobs(script: str, words: list[str]) -> list[dict[str, Any]]:
    """The job files of a command line."""
    jobs: list[dict[str, Any]] = []
    first = [STEPS[script].script] if script in STEPS else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "check_models", lambda key, job: None)
        chat.main([*first, *words], lambda job: jobs.append(copy.deepcopy(job)))
    return jobs


def sample(script: str, name: str) -> list[str]:
    """The words of an argument with a value that is not its default."""
    row = arguments(script)[name]
    default = row["default"][script]
    if default is False:
        return [f"--{name}"]
    if name in SAMPLES:
        return [f"--{name}", *SAMPLES[name]]
    if "choices" in row:
        return [f"--{name}", str(row["choices"][-1])]
    is_number = row.get("type") or isinstance(default, int | float)
    return [f"--{name}", "3" if is_number else "other"]


def paths_of(script: str, row: dict[str, Any]) -> list[str]:
    paths = row.get("sets", [])
    paths = paths[script] if isinstance(paths, dict) else paths
    return [paths] if isinstance(paths, str) else paths


def test_the_list_has_every_argument() -> None:
    counts = {script: len(arguments(script).keys() - LAUNCHER) for script in (*STEPS, "e2e")}
    assert counts == {"sft": 32, "reward": 32, "dpo": 33, "ppo": 60, "e2e": 7}
    assert all(arguments(script).keys() >= LAUNCHER for script in STEPS)
    kinds = {"sets", "mapped", "ignored", "refused"}
    assert all(len(kinds & row.keys()) == 1 for s in STEPS for row in arguments(s).values())


@pytest.mark.parametrize(("script", "name"), PAIRS)
def test_each_argument_is_mapped_ignored_or_refused(script: str, name: str) -> None:
    row = arguments(script)[name]
    beside = BESIDE.get(name, [])
    if name == "offload_reference_model" and script == "ppo":
        beside = ["--actor_zero_stage", "3"]
    words = sample(script, name)
    before = make_jobs(script, [] if "test" in name else beside)
    if "refused" in row:
        with pytest.raises(ConfigError) as error:
            make_jobs(script, words)
        assert f"--{name}" in str(error.value)
        assert row["refused"] in str(error.value)
        default = row.get("off", row["default"][script])
        values = map(str, default) if isinstance(default, list) else [str(default)]
        if default is not False and default != "":
            assert make_jobs(script, [f"--{name}", *values]) == before
        return
    jobs = make_jobs(script, [*beside, *words])
    assert (jobs == before) == ("ignored" in row)
    after = jobs[0]
    for path in paths_of(script, row):
        section, _, key = path.rpartition(".")
        value = (find(after, section) if section else after)[key]
        assert value == (words[1] if isinstance(value, str) else float(words[1]))


@pytest.mark.parametrize("script", STEPS)
def test_what_is_made_is_a_valid_job_file(script: str) -> None:
    words = "--dtype bf16 --lr_scheduler_type cosine --num_warmup_steps 4 --offload".split()
    words += ["--enable_tensorboard"]
    words += ["--critic_zero_stage", "3"] if script == "ppo" else ["--zero_stage", "3"]
    (job,) = make_jobs(script, words)
    engines = [job["engine"], *(job["args"].get(it, {}) for it in ("critic", "reference"))]
    for config in engines:
        if config:
            parse_config(config)
            assert config["bf16"] == {"enabled": True}
    roles = {name: rayzero.Role(**role) for name, role in job.get("roles", {}).items()}
    rayzero.Job(**job | {"roles": roles})


def changed(key: str, **given: Any) -> dict[str, Any]:
    job = yaml.safe_load((HERE / STEPS[key].job).read_text())
    job["workers"] = {"min": 1, "max": 2}
    return apply_arguments(key, given, job, QUESTIONS)


def test_batches_are_those_of_all_workers() -> None:
    job = changed("ppo", per_device_training_batch_size=16, gradient_accumulation_steps=2)
    for config in (job["engine"], job["args"]["critic"], job["args"]["reference"]):
        assert config["train_batch_size"] == 16 * 2 * 2
        assert config["gradient_accumulation_steps"] == 2
    job = changed("sft", per_device_train_batch_size=16, num_train_epochs=3)
    assert (job["engine"]["train_batch_size"], job["steps"]) == (32, 600)
    assert changed("ppo", generation_batches=1)["rollouts"]["max_version_lag"] == 0


def test_each_engine_has_its_own_stage_rate_and_memory() -> None:
    given = {"actor_zero_stage": 3, "critic_zero_stage": 1, "offload": True, "dtype": "fp16"}
    job = changed("ppo", **given, actor_learning_rate=1e-5, critic_learning_rate=2e-5)
    actor, critic, reference = job["engine"], job["args"]["critic"], job["args"]["reference"]
    cpu = {"device": "cpu"}
    assert actor["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": cpu,
        "offload_param": cpu,
    }
    assert critic["zero_optimization"] == {"stage": 1, "offload_optimizer": cpu}
    assert reference["zero_optimization"] == {"stage": 3}
    for config, lr in ((actor, 1e-5), (critic, 2e-5)):
        assert config["optimizer"]["params"]["lr"] == lr
        assert config["scheduler"]["params"]["warmup_max_lr"] == lr
        assert config["fp16"] == {"enabled": True, "loss_scale_window": 100}
    offloaded = changed("dpo", zero_stage=3, offload_reference_model=True)
    assert offloaded["args"]["reference"]["zero_optimization"]["offload_param"] == cpu
    with pytest.raises(ConfigError, match=r"at stage 2.*\n  allowed: --zero_stage 3"):
        changed("dpo", zero_stage=2, offload_reference_model=True)


def rates(make: Callable[[torch.optim.Optimizer], Any], lr: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return found


def test_the_job_files_schedules_end_with_the_job() -> None:
    job = changed("ppo", num_train_epochs=2, num_warmup_steps=7)
    assert job["steps"] == 2 * QUESTIONS * 8 // 128
    for config in (job["engine"], job["args"]["critic"]):
        params = config["scheduler"]["params"]
        assert (params["total_num_steps"], params["warmup_num_steps"]) == (job["steps"], 7)


def our_schedule(section: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """What the engine steps."""
    if section is None:
        return None
    kind, params = section["type"], section["params"]
    if kind in LR_CURVES:
        return StepSchedule(optimizer, LR_CURVES[kind](**params))
    return getattr(torch.optim.lr_scheduler, kind)(optimizer, **params)


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup"]
)
def test_schedules_are_those_of_transformers(kind: str, warmup: int) -> None:
    transformers = pytest.importorskip("transformers")
    lr, steps = 0.1, 40
    theirs = rates(lambda it: transformers.get_scheduler(kind, it, warmup, steps), lr, steps)
    section = make_schedule(kind, lr, warmup, steps)
    ours = rates(lambda it: our_schedule(section, it), lr, steps)
    if warmup and kind != "constant":  # DeepSpeed's schedules begin with two steps at 0
        assert ours[1 : warmup + 1] == pytest.approx(theirs[:warmup], abs=1e-12)
        theirs = theirs if "cosine" in kind else [0.0, *theirs[:-1]]
        ours, theirs = ours[warmup + 1 :], theirs[warmup + 1 :]
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_a_schedule_that_ends_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="polynomial"):
        changed("sft", lr_scheduler_type="polynomial")


class Runner:
    """Writes what a step would."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)
        folder = Path(job["args"]["output_dir"])
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()


def test_steps_are_chained_by_folders(tmp_path: Path) -> None:
    run = Runner()
    words = ["--output-dir", str(tmp_path), "--actor-model", "small", "--reward-model", "mine"]
    chat.main(["--step", "1", "2", *words, "--actor-zero-stage", "3"], run)
    chat.main(["--step", "3", *words, "--reward-zero-stage", "1"], run)
    sft, reward, ppo = run.jobs
    actor, rewards = f"{tmp_path}/actor-models/small", f"{tmp_path}/reward-models/mine"
    assert sft["args"]["output_dir"] == actor
    assert sft["args"]["model"] == {"layers": 4, "width": 128}
    assert sft["engine"]["zero_optimization"]["stage"] == 3
    assert reward["args"] == {"model_name_or_path": actor, "output_dir": rewards}
    assert ppo["args"]["actor_model_name_or_path"] == actor
    assert ppo["args"]["critic_model_name_or_path"] == rewards
    assert ppo["args"]["output_dir"] == f"{tmp_path}/step3-models/small"
    assert ppo["args"]["critic"]["zero_optimization"]["stage"] == 1
    assert ppo["roles"]["rollout"]["args"] == {"actor_model_name_or_path": actor}
    assert ppo["roles"]["reward"]["args"] == {"critic_model_name_or_path": rewards}
    assert len({job["name"] for job in run.jobs}) == 3
    assert {job["checkpoint"]["path"] for job in run.jobs} == {f"{tmp_path}/runs"}


def test_a_step_without_its_models_is_refused(tmp_path: Path) -> None:
    run = Runner()
    with pytest.raises(ConfigError, match=r"no model in .*actor-models/tiny\n.*--step 1"):
        chat.main(["--step", "3", "--output-dir", str(tmp_path)], run)
    chat.main(["--step", "1", "--output-dir", str(tmp_path)], run)
    with pytest.raises(ConfigError, match=r"no model in .*reward-models/tiny\n.*--step 2"):
        chat.main(["--step", "3", "--output-dir", str(tmp_path)], run)
    assert len(run.jobs) == 1


def test_print_config_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = Runner()
    chat.main(["--print-config"], run)
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [job["name"] for job in printed] == [
        "rlhf-sft-tiny",
        "rlhf-reward-tiny",
        "rlhf-ppo-tiny",
    ]
    assert not run.jobs


@pytest.mark.parametrize(
    "words", [["--no-such"], ["step1_supervised_finetuning", "--lerning_rate"]]
)
def test_unknown_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        chat.main(words, Runner())
    assert end.value.code == 2


def test_sizes_of_opt_are_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--actor-model facebook/opt-1.3b")):
        chat.main(["--actor-model", "facebook/opt-1.3b", "--print-config"], Runner())


def test_the_guides_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Runner()
    lines = [it for block in blocks("docs/from-rlhf.md") for it in block.lines()]
    for line in [it for it in lines if it.startswith("python -m examples.rlhf.chat ")]:
        chat.main(shlex.split(line, comments=True)[3:], run)
    names = ["rlhf-sft-tiny", "rlhf-reward-tiny", "rlhf-ppo-tiny", "rlhf-dpo"]
    assert [job["name"] for job in run.jobs] == names


@pytest.mark.slow
def test_the_steps_run_as_jobs(tmp_path: Path) -> None:
    def run(job: dict[str, Any]) -> None:
        assert chat.run_job(job | {"steps": 2}).steps == 2

    with closing(connect("local", LocalCluster({"OMP_NUM_THREADS": "1"}))):  # of all three
        chat.main(["--output-dir", str(tmp_path), "--actor-zero-stage", "3"], run)
    for folder in ("actor-models", "reward-models", "step3-models"):
        assert (tmp_path / folder / "tiny/model.safetensors").exists()
