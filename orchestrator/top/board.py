"""A snapshot as a board for a terminal, or as one line for a file. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayzero.orchestrator.states import State
from rayzero.orchestrator.top.figures import clean, duration, number, shares, size, spark
from rayzero.orchestrator.top.source import Snapshot

WIDTH = 60
"""Columns of a bar or curve."""
SILENT_S = 10.0
_EVENTS = 6
_CHECKPOINTS = 3
_TILES = 128
"""More ranks than this are only counted, by phase."""

_STATES = {
    State.RUNNING: "black on green",
    State.SUCCEEDED: "black on green",
    State.FAILED: "white on red",
    State.RECOVERING: "black on yellow",
    State.RESIZING: "black on yellow",
    State.STOPPING: "black on yellow",
}
_PHASES = {
    "forward": "blue",
    "backward": "magenta",
    "reduce": "red",
    "update": "cyan",
    "data": "yellow",
    "mirror": "green",
    "publish": "bright_magenta",
    "gather": "bright_magenta",
}
_CAUSES = {
    "productive": "green",
    "redone": "red",
    "interrupted": "bright_red",
    "adoption": "bright_red",
    "waiting": "yellow",
    "data": "bright_yellow",
    "starting": "blue",
    "resizing": "magenta",
    "mirror": "bright_green",
    "checkpoint": "cyan",
}


def is_over(now: Snapshot) -> bool:
    """Whether that is how it ended."""
    return now["state"] in {one.value for one in State if one.is_final}


def line(now: Snapshot) -> str:
    """`gpt: running, step 12,345/20,000, loss 2.346, ...`"""
    progress, loss = now["progress"], now["training"]["loss"]
    parts = [f"{clean(now['job'])}: {clean(now['state'])}", _steps(now)]
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if progress["tokens_per_s"] is not None:
        parts.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"{now['world_size']} ranks")
    parts.append(f"goodput {now['goodput']['ratio']:.1%}")
    if now["faults"]:
        parts.append(f"{len(now['faults'])} faults")
    if not is_over(now) and progress["remaining_s"] is not None:
        parts.append(f"{duration(progress['remaining_s'])} left")
    return ", ".join(parts)


def board(now: Snapshot, trouble: str | None = None) -> RenderableType:
    """All of it. `trouble`: why the numbers are old, if they are."""
    rows: list[RenderableType] = [_head(now, trouble), _progress(now)]
    rows.append(Panel(_curves(now), title="loss, world size", title_align="left"))
    rows.append(Panel(_goodput(now["goodput"]), title="goodput", title_align="left"))
    rows.append(Panel(_ranks(now["ranks"]), title="ranks", title_align="left"))
    rows.append(Panel(_happened(now), title="what happened", title_align="left"))
    rows.append(Panel(_stored(now), title="checkpoints and replicas", title_align="left"))
    return Group(*rows)


def _head(now: Snapshot, trouble: str | None) -> Text:
    state = clean(now["state"])
    style = next((style for one, style in _STATES.items() if one.value == state), "black on white")
    stage = "" if now["stage"] is None else f", ZeRO stage {now['stage']}"
    made = f"  rayzero {clean(now['version'])}{stage}, generation {now['generation']}"
    head = Text.assemble((clean(now["job"]), "bold"), "  ", (f" {state} ", style), (made, "dim"))
    return Text.assemble(head, "\n", (trouble, "bold red")) if trouble else head


def _progress(now: Snapshot) -> RenderableType:
    progress = now["progress"]
    left = "-" if is_over(now) else duration(progress["remaining_s"])
    limits = now["workers"]
    facts = {
        "step": _steps(now).removeprefix("step "),
        "left": left,
        "running for": duration(now["at_s"] - now["began_s"]),
        "step time": duration(progress["step_s"]),
        "tokens/s": number(progress["tokens_per_s"], ",.0f"),
        "ranks": f"{now['world_size']} (of {limits['min']} to {limits['max']})",
    }
    if not progress["steps"]:
        return _facts(facts)
    bar = Table.grid()
    bar.add_row(ProgressBar(total=progress["steps"], completed=progress["step"], width=WIDTH))
    return Group(bar, _facts(facts))


def _facts(facts: dict[str, str]) -> RenderableType:
    """Side by side, as many as fit; without those that nobody knows."""
    told = {key: value for key, value in facts.items() if value != "-"}
    rows = [Text.assemble((f"{key} ", "dim"), value) for key, value in told.items()]
    return Columns(rows, padding=(0, 3))


def _curves(now: Snapshot) -> RenderableType:
    training = now["training"]
    losses = [loss for _, loss in now["loss"]]
    facts = {
        "loss": number(training["loss"]),
        "learning rate": number(training["learning_rate"]),
        "gradient norm": number(training["gradient_norm"]),
        "loss scale": number(None if training["loss_scale"] == 1 else training["loss_scale"], "g"),
        "flops used": number(training["model_flops_utilization"], ".1%"),
    }
    rows: list[RenderableType] = [Text(spark(losses, WIDTH), "cyan"), _facts(facts)]
    return Group(*rows, *_sizes(now))


def _sizes(now: Snapshot) -> Iterator[RenderableType]:
    """World size over time, and below it where faults were."""
    began, until = now["began_s"], max(now["at_s"], now["began_s"] + 1e-9)

    def column(at_s: float) -> int:
        return min(WIDTH - 1, max(0, int((at_s - began) / (until - began) * WIDTH)))

    sizes: list[int] = [0] * WIDTH
    for one in now["generations"]:
        start = column(one["at_s"])
        sizes[start:] = [one["world_size"]] * (WIDTH - start)
    if any(sizes):
        most = max(sizes)
        blocks = "".join(" ▁▂▃▄▅▆▇█"[round(8 * each / most)] for each in sizes)
        yield Text.assemble((blocks, "blue"), (f" {sizes[-1]}", "dim"))
        marks = Counter(column(one["at_s"]) for one in now["faults"])
        if marks:
            text = "".join("x" if at in marks else " " for at in range(WIDTH))
            yield Text.assemble((text, "bold red"), (f" {sum(marks.values())} faults", "dim"))


def _goodput(told: dict[str, Any]) -> RenderableType:
    seconds = {**told["seconds"], "under way": told["pending_s"]}
    ordered = sorted(seconds, key=lambda one: (one != "productive", -seconds[one]))
    causes = [one for one in ordered if seconds[one] > 0]
    columns = shares([seconds[one] for one in causes], WIDTH)
    styles = {
        one: _CAUSES.get(one, "magenta" if one.startswith("recovery") else "white")
        for one in causes
    }
    bar = Text.assemble(
        *(("█" * many, styles[one]) for one, many in zip(causes, columns, strict=True))
    )
    bar.append(f" {told['ratio']:.1%}", "bold")
    parts = (
        Text.assemble(("█ ", styles[one]), clean(one), (f" {duration(seconds[one])}", "dim"))
        for one in causes
    )
    return Group(bar, Columns(parts, padding=(0, 2)))


def _ranks(ranks: list[dict[str, Any]]) -> RenderableType:
    if not ranks:
        return Text("no rank has said anything yet", "dim")
    if len(ranks) > _TILES:
        phases = Counter(clean(one["phase"] or "unknown") for one in ranks)
        silent = sum((one["silent_s"] or 0.0) >= SILENT_S for one in ranks)
        counts = Text("   ").join(
            Text.assemble(("■ ", _PHASES.get(phase, "white")), f"{phase} {many}")
            for phase, many in sorted(phases.items())
        )
        return Group(counts, Text(f"{silent} silent", "red")) if silent else counts
    return Columns([_tile(one) for one in ranks], padding=(0, 2))


def _tile(one: dict[str, Any]) -> Text:
    phase = clean(one["phase"] or "unknown")
    waiting = " (waiting)" if one["waiting"] else ""
    tile = Text.assemble(("■ ", _PHASES.get(phase, "white")), f"{one['rank']} {phase}{waiting}")
    if (one["silent_s"] or 0.0) >= SILENT_S:
        tile.append(f" silent {duration(one['silent_s'])}", "bold red")
    return tile


def _happened(now: Snapshot) -> RenderableType:
    rows = [
        (one["at_s"], Text(clean(one["cause"]), "red"), clean(one["text"])) for one in now["faults"]
    ]
    for one in now["ways"]:
        passed = "repaired" if one["kind"] == "repair" else "resized"
        sizes = f"{one['world_size_before']} -> {one['world_size']} ranks"
        told = f"in {duration(one['total_s'])}: {sizes} after step {one['step']:,}"
        rows.append((one["at_s"], Text(passed, "green"), told))
    if not rows:
        return Text("no fault, no resize", "dim")
    table = Table.grid(padding=(0, 2))
    for at_s, kind, told in sorted(rows, key=lambda row: -row[0])[:_EVENTS]:
        table.add_row(Text(_clock(at_s), "dim"), kind, Text(told))
    return table


def _stored(now: Snapshot) -> RenderableType:
    replica = now["replicas"]
    step = "none" if replica["step"] is None else f"step {replica['step']:,}"
    text = Text.assemble(("replica ", "dim"), f"{step}, {size(replica['bytes'])}")
    if now["checkpoint_failures"]:
        text.append(f"   {now['checkpoint_failures']} tries to write failed", "yellow")
    rows = [
        Text.assemble(
            (f"{_clock(one['at_s'])}  ", "dim"),
            f"step {one['step']:,}, {size(one['bytes'])} in {duration(one['seconds'])}",
        )
        for one in reversed(now["checkpoints"][-_CHECKPOINTS:])
    ]
    return Group(text, *(rows or [Text("no checkpoint by this run", "dim")]))


def _steps(now: Snapshot) -> str:
    progress = now["progress"]
    total = f"/{progress['steps']:,}" if progress["steps"] else ""
    return f"step {progress['step']:,}{total}"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S")
