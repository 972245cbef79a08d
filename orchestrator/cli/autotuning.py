"""The output of `rayzero launch --autotuning`: a line for each try, a table, files of the best."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.orchestrator.cli.plan import PIPE_WIDTH

if TYPE_CHECKING:
    from rayzero.orchestrator.job.tuning import Tuned
    from rayzero.orchestrator.spec import JobSpec


def tune_and_report(spec: JobSpec, address: str | None, as_json: bool) -> JobSpec | None:
    """Tries the settings of a job and writes `results_dir`. Returns the job with the best ones;
    None if every try failed. Raises as `ScriptTuner.tune`."""
    from rayzero.orchestrator.cluster.connect import connect  # imports Ray, which takes a second
    from rayzero.orchestrator.job.tuning import ScriptTuner

    show = (lambda line: None) if as_json else partial(print, flush=True)
    cluster = connect(address)
    try:
        tuned = ScriptTuner(spec, cluster, show).tune()
    finally:
        cluster.close()
    table = _to_table(tuned)
    folder = Path(tuned.settings.results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.txt").write_text(table, encoding="utf-8")
    if as_json:
        for result in tuned.results:
            print(json.dumps({"type": "try", **asdict(result)}), flush=True)
    else:
        print(table, end="", flush=True)
    if tuned.best is None:
        print("every try failed: exps_dir has their logs", file=sys.stderr)
        return None
    config = folder / "ds_config_optimal.json"
    config.write_text(json.dumps(tuned.config, indent=2) + "\n", encoding="utf-8")
    command = _best_command(sys.argv[1:], spec, tuned.spec)
    (folder / "cmd_optimal.txt").write_text(f"{command}\n", encoding="utf-8")
    if not as_json:
        print(f"best: {tuned.best.candidate.name}; {config} has its config", flush=True)
    return tuned.spec


def _to_table(tuned: Tuned) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("try", title=f"by {tuned.settings.metric}", title_justify="left")
    for name in ("batch", "samples/s", "s/step", "TFLOP/s", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for it in tuned.results:
        numbers = (it.global_batch, it.samples_per_s, it.step_s, it.flops_per_s, it.peak_bytes)
        scaled = zip(numbers, (1, 1, 1, 1e12, 2**30), strict=True)
        cells = [f"{number / unit:.4g}" if number else "" for number, unit in scaled]
        table.add_row(it.candidate.name, *cells, "best" if it is tuned.best else it.failure)
    console = Console(width=PIPE_WIDTH, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _best_command(words: Sequence[str], spec: JobSpec, best: JobSpec) -> str:
    """The command that was given, with the best settings in place of tuning."""
    if spec.launch is None or best.launch is None:
        return ""
    options = [*words[: len(words) - len(spec.launch.args)]]
    at = next(i for i, word in enumerate(options) if word.startswith("--autotuning"))
    overrides = json.dumps(best.launch.overrides)
    end = at + 1 + (options[at] == "--autotuning")
    options[at:end] = ["--set", f"launch.overrides={overrides}"]
    return shlex.join(["rayzero", *options, *best.launch.args])
