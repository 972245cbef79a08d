"""What becomes of the runs that a job's folder has from before."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.claims import new_claim
from rayzero.orchestrator.job.lease import acquire_lease
from rayzero.orchestrator.job.past_runs import (
    CHANGED_SOURCE,
    PastRuns,
    load_past_runs,
    repeated_result,
)
from rayzero.orchestrator.job.source_hash import MAX_MODULES, hash_source
from rayzero.orchestrator.job_events import RunEnded
from rayzero.orchestrator.journal.files import read_journal
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec_sections import LaunchSpec
from tests.orchestrator.support import StoreInFolder, begun, plan, write_journal

ENGINE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def a_job(folder: Path, source: str = "a", run: str = "2", **changes: Any) -> JobPlan:
    changes = {"engine": ENGINE, "steps": 40} | changes
    made = plan(folder, **changes)
    return replace(made, source=source, worker_spec=replace(made.worker_spec, run=run))


def write_run(job: JobPlan, state: str = "succeeded") -> None:
    """The journal of a run of 40 steps; lost if `state` is empty."""
    end = [RunEnded(state)] if state else []
    step = StepRecord(40, 2, 1, 2.5, 0.0, 0.5, {})
    write_journal(job.job_folder, begun(job, job.worker_spec.run), step, *end)
    metrics = {"steps": 40, "loss": {"first": 8.0, "last": 2.5}, "score": 0.5}
    job.summary_path.write_text(json.dumps(metrics))


def load(job: JobPlan) -> tuple[PastRuns, list[str]]:
    warnings: list[str] = []
    return load_past_runs(job, warnings.append), warnings


def test_result_of_the_same_finished_job_is_repeated(tmp_path: Path):
    write_run(a_job(tmp_path, run="1"))
    StoreInFolder(tmp_path).save(20, 40)
    same = a_job(tmp_path, workers={"min": 1}, metrics={"port": 0}, recovery={"max_faults": 3})
    past, _ = load(same)
    assert past.lost is None
    result = repeated_result(same, past.last)
    assert result is not None
    assert (result.steps, result.metrics["loss"]["last"]) == (40, 2.5)
    assert result.returned == {"score": 0.5}
    assert "has finished all 40 steps" in result.note
    assert "--restart" in result.note


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"engine": ENGINE | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}},
            "engine.optimizer.params.lr: 0.001 -> 0.01",
        ),
        ({"args": {"width": 8}}, "args.width: (none) -> 8"),
        ({"entrypoint": "m:other"}, 'entrypoint: "m:f" -> "m:other"'),
        ({"source": "b"}, f"m:f: {CHANGED_SOURCE}"),
        ({"steps": 30}, "steps: 40 -> 30"),
    ],
)
def test_another_job_with_nothing_left_is_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
):
    write_run(a_job(tmp_path, run="1"))
    StoreInFolder(tmp_path).save(40)
    other = a_job(tmp_path, **changes)
    past, _ = load(other)
    with pytest.raises(ConfigError, match="nothing is left to train") as refused:
        repeated_result(other, past.last)
    assert [text.strip() for text in refused.value.seen.splitlines()[1:]] == [line]
    assert "--restart" in refused.value.fix


@pytest.mark.parametrize(
    "case", ["steps left", "no steps", "failed before", "no checkpoint", "by its path"]
)
def test_job_that_may_have_steps_left_runs(tmp_path: Path, case: str):
    write_run(a_job(tmp_path, run="1"), "failed" if case == "failed before" else "succeeded")
    StoreInFolder(tmp_path).save(*([20] if case == "no checkpoint" else [40]))
    changes: dict[str, Any] = {
        "steps left": {"steps": 41, "source": "b"},
        "no steps": {"steps": None},
        "by its path": {"checkpoint": {"resume": str(tmp_path / "job" / "step-40")}},
    }.get(case, {})
    job = a_job(tmp_path, **changes)
    past, _ = load(job)
    assert repeated_result(job, past.last) is None
    assert past.last is not None
    differs = (f"m:f: {CHANGED_SOURCE}",) if case == "steps left" else ()
    assert past.last.differences == differs


def test_journal_of_an_older_version_does_not_differ(tmp_path: Path):
    """It lacks keys, which had their defaults, and a source."""
    job = a_job(tmp_path, run="1")
    write_run(job)
    path = tmp_path / "job" / "job.json"
    document = json.loads(path.read_text())
    del document["source"], document["spec"]["ledger"], document["spec"]["recovery"]["balance"]
    path.write_text(json.dumps(document))
    past, _ = load(a_job(tmp_path))
    assert past.last is not None
    assert past.last.differences == ()


@pytest.mark.parametrize("state", ["succeeded", "failed", ""])
def test_restart_sets_the_files_of_the_last_run_aside(tmp_path: Path, state: str):
    """Also of a run that was lost, which is thereby given up."""
    write_run(a_job(tmp_path, run="1"), state)
    StoreInFolder(tmp_path).save(20, 40)
    folder, aside = tmp_path / "job", tmp_path / "job.2"
    (tmp_path / "job.1").mkdir()
    before = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    lease = acquire_lease(str(folder), new_claim("job", 60.0), print)
    past, warnings = load(a_job(tmp_path, checkpoint={"resume": "scratch"}, steps=30))
    assert past == PastRuns()
    assert f"files of its last run are now in {aside}" in warnings[0]
    after = {str(path.relative_to(aside)) for path in aside.rglob("*")}
    assert after - {"events.jsonl"} == before - {"events.jsonl"}
    assert [path.name for path in folder.iterdir()] == ["lease"]
    lease.check()
    lease.release()
    kept = read_journal(str(aside))
    assert kept is not None
    assert kept.end_state == (state or "stopped")
    assert StoreInFolder(tmp_path, resume="scratch").resume_point() is None


@pytest.mark.parametrize("run", ["1", "2"])
def test_lost_run_that_began_anew_is_continued_by_the_same_command(tmp_path: Path, run: str):
    """Which a pod that submits the job repeats after the head was lost, and Ray repeats as well."""
    scratch = {"checkpoint": {"resume": "scratch"}}
    write_run(a_job(tmp_path, run="1", **scratch), "")
    past, _ = load(a_job(tmp_path, run=run, **scratch))
    assert past.lost is not None
    assert past.lost.step == 40


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 3, "run": "1"}', b"\xff\x00"])
def test_damaged_journal_is_not_overwritten(tmp_path: Path, content: bytes):
    """By a run that begins anew, unless that is said: the damaged one may be half done."""
    write_run(a_job(tmp_path, run="1"), "")
    StoreInFolder(tmp_path).save(20)
    path = tmp_path / "job" / "job.json"
    path.write_bytes(content)
    for resume in ("auto", "never"):
        with pytest.raises(ConfigError, match=f"{path} is damaged") as refused:
            load(a_job(tmp_path, checkpoint={"resume": resume}))
    assert "--restart" in refused.value.fix
    assert "checkpoint.resume: PATH" in refused.value.fix
    named = str(path.with_name("step-20"))
    assert load(a_job(tmp_path, checkpoint={"resume": named})) == (PastRuns(), [])
    assert path.read_bytes() == content
    _, warnings = load(a_job(tmp_path, checkpoint={"resume": "scratch"}))
    assert "the files of its last run are now in" in warnings[0]
    assert (tmp_path / "job.1" / "job.json").read_bytes() == content


def test_process_that_is_started_again_after_the_end_does_nothing(tmp_path: Path):
    for changes in ({}, {"checkpoint": {"resume": "scratch"}}):
        job = a_job(tmp_path, run="1", **changes)
        write_run(job)
        with pytest.raises(JobStoppedError, match="has ended before"):
            load(job)


def a_function(ctx: Any) -> None:
    del ctx


def test_source_is_that_of_the_code(tmp_path: Path):
    def hashed(source: str, **changes: Any) -> str:
        (tmp_path / "m.py").write_text(source)
        return hash_source(plan(tmp_path, **changes).spec, str(tmp_path))

    first = hashed("def f(ctx):\n    return 1\n")
    assert first
    assert hashed("# a comment\ndef f( ctx ):\n\n    return 1\n") == first
    assert hashed("def f(ctx):\n    return 2\n") != first
    assert hashed("def f(ctx):") == ""
    assert hash_source(plan(tmp_path).spec, str(tmp_path / "elsewhere")) == ""
    assert hash_source(plan(tmp_path).spec, "", a_function) not in ("", first)
    assert hash_source(plan(tmp_path).spec, "", len) == ""


LOCAL_MODULES = {
    "a/__init__.py": "from . import two, missing\nfrom .... import beyond\n",
    "a/one.py": "from .three import x as y\nfrom .b.four import *\n",
    "a/two.py": "x = 1\n",
    "a/three.py": "def f():\n    import late, src.late\n",
    "a/b/four.py": "from ..five import x\n",
    "a/five.py": "import broken, torch, os\n",
    "late.py": "import train, src.train\n",
}
OTHER_MODULES = ("unused.py", "a/unused.py", ".venv/torch/__init__.py", "broken.py")


@pytest.mark.parametrize("kind", ["module", "package", "script", "value"])
def test_source_includes_the_local_modules_that_it_imports(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """By each form of import, directly and through others; nothing of them is run."""
    top = tmp_path / "src" if kind == "package" else tmp_path
    files = LOCAL_MODULES | dict.fromkeys(OTHER_MODULES, "import")
    files["train.py"] = "from .a import one\n" if kind == "package" else "import a.one\n"
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"raise SystemExit\n{text}")
    spec, function = plan(tmp_path).spec, None
    spec = spec.model_copy(update={"entrypoint": "src.train:f" if kind == "package" else "train:f"})
    if kind == "script":
        spec = spec.model_copy(update={"launch": LaunchSpec(script="train.py")})
    elif kind == "value":
        module = ModuleType("train")
        text = f"import a.one\n{inspect.getsource(a_function)}"
        (top / "train.py").write_text(text.replace(": Any", ""))
        code = "def a_function(ctx):\n    del ctx"
        exec(compile(f"\n{code}", str(top / "train.py"), "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, "train", module)
        function = module.__dict__["a_function"]

    def hashed() -> str:
        return hash_source(spec, str(tmp_path), function)

    first = hashed()
    assert first
    for name in LOCAL_MODULES:
        text = (top / name).read_text()
        (top / name).write_text(f"{text}added = 1\n")
        assert hashed() not in ("", first), name
        (top / name).write_text(f"{text}# added\n")
        assert hashed() == first, name
    for name in OTHER_MODULES:
        (top / name).write_text("added = 1; import")
        assert hashed() == first, name


def test_source_of_a_large_library_is_cut(tmp_path: Path):
    """At the same place each time, so that the same files have the same hash."""
    count = 3 * MAX_MODULES
    for number in range(count):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}")
    (tmp_path / "m.py").write_text("import m0")
    first = hash_source(plan(tmp_path).spec, str(tmp_path))
    (tmp_path / f"m{count - 1}.py").write_text("x = 1")
    assert hash_source(plan(tmp_path).spec, str(tmp_path)) == first
    (tmp_path / "m5.py").write_text("x = 1")
    assert hash_source(plan(tmp_path).spec, str(tmp_path)) != first
