"""Renders a snapshot as a board for a terminal, or as one line of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayzero.orchestrator.machine import FINAL_STATES, State
from rayzero.orchestrator.top.format import (
    count_of,
    format_duration,
    format_number,
    format_size,
    printable_text,
    sparkline,
    split_width,
)

Snapshot = dict[str, Any]
"""The value of /snapshot.json."""

BAR_WIDTH = 60
"""Width of a bar or curve, in columns."""
SILENT_RANK_S = 10.0
_MAX_EVENTS = 6
_MAX_CHECKPOINTS = 3
_MAX_SOURCES = 10
_MAX_RANK_TILES = 128
"""If there are more ranks, they are only counted by phase."""

_STATE_STYLES: dict[str, str] = {
    State.RUNNING: "black on green",
    State.SUCCEEDED: "black on green",
    State.FAILED: "white on red",
    State.RECOVERING: "black on yellow",
    State.RESIZING: "black on yellow",
    State.STOPPING: "black on yellow",
}
_PHASE_STYLES = {
    "forward": "blue",
    "backward": "magenta",
    "reduce": "red",
    "update": "cyan",
    "data": "yellow",
    "samples": "yellow",
    "mirror": "green",
    "publish": "bright_magenta",
    "gather": "bright_magenta",
}
_CATEGORY_STYLES = {
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


def has_ended(now: Snapshot) -> bool:
    return now["state"] in FINAL_STATES


def snapshot_line(now: Snapshot) -> str:
    """Returns a text such as `gpt: running, step 12,345/20,000, loss 2.346, ...`."""
    progress, loss = now["progress"], now["training"]["loss"]
    parts = [f"{printable_text(now['job'])}: {printable_text(now['state'])}", _step_text(now)]
    if now.get("waiting_for"):  # a page's job may be of an earlier version
        parts.append(f"waiting for {printable_text(now['waiting_for'])}")
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if progress["tokens_per_s"] is not None:
        parts.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    parts.append(count_of(now["world_size"], "rank"))
    parts.append(f"goodput {now['goodput']['ratio']:.1%}")
    if now["faults"]:
        parts.append(count_of(len(now["faults"]), "fault"))
    if not has_ended(now) and progress["remaining_s"] is not None:
        parts.append(f"{format_duration(progress['remaining_s'])} left")
    return ", ".join(parts)


def render_board(now: Snapshot, error: str | None = None) -> RenderableType:
    """Renders the whole board. `error` says why the snapshot is out of date, if it is."""
    roles = {"roles": _roles_panel(now)} if now.get("roles") else {}
    streams = {"streams": _streams_table(now)} if now.get("streams") else {}
    panels = roles | {
        "loss, world size": _training_panel(now),
        "goodput": _goodput_bar(now["goodput"]),
        **streams,
        "ranks": _rank_tiles(now["ranks"]),
        "events": _events_table(now),
        "checkpoints and replicas": _checkpoints_table(now),
    }
    framed = (Panel(panel, title=title, title_align="left") for title, panel in panels.items())
    return Group(_header(now, error), _progress_panel(now), *framed)


def _header(now: Snapshot, error: str | None) -> Text:
    state = printable_text(now["state"])
    style = _STATE_STYLES.get(state, "black on white")
    stage = "" if now["stage"] is None else f", ZeRO stage {now['stage']}"
    version = f"  rayzero {printable_text(now['version'])}{stage}, generation {now['generation']}"
    head = Text.assemble(
        (printable_text(now["job"]), "bold"), "  ", (f" {state} ", style), (version, "dim")
    )
    if now.get("waiting_for"):
        waiting = f"waiting for {printable_text(now['waiting_for'])}"
        head = Text.assemble(head, "\n", (waiting, "yellow"))
    return Text.assemble(head, "\n", (error, "bold red")) if error else head


def _progress_panel(now: Snapshot) -> RenderableType:
    progress, limits = now["progress"], now["workers"]
    facts = {
        "step": _step_text(now).removeprefix("step "),
        "left": "-" if has_ended(now) else format_duration(progress["remaining_s"]),
        "running for": format_duration(now["at_s"] - now["began_s"]),
        "step time": format_duration(progress["step_s"]),
        "tokens/s": format_number(progress["tokens_per_s"], ",.0f"),
        "ranks": f"{now['world_size']} (of {limits['min']} to {limits['max']})",
    }
    if not progress["steps"]:
        return _labelled_values(facts)
    bar = Table.grid()
    bar.add_row(ProgressBar(total=progress["steps"], completed=progress["step"], width=BAR_WIDTH))
    return Group(bar, _labelled_values(facts))


def _labelled_values(facts: dict[str, str]) -> RenderableType:
    """Renders values side by side, as many as fit in a line. Unknown values are left out."""
    texts = [
        Text.assemble((f"{key} ", "dim"), value) for key, value in facts.items() if value != "-"
    ]
    return Columns(texts, padding=(0, 3))


def _roles_panel(now: Snapshot) -> RenderableType:
    """Renders a line for each role, and one for the rollout buffer."""
    rollouts = now.get("rollouts")
    lines: list[RenderableType] = []
    for name, role in now["roles"].items():
        facts = {printable_text(name): f"{role['workers']} (of {role['min']} to {role['max']})"}
        if rollouts is not None and name in rollouts["leased"]:
            facts["tasks in flight"] = format_number(rollouts["leased"][name], ",d")
        facts["oldest weights"] = format_number(role.get("version"), ",d")
        facts["tokens/s"] = format_number(role.get("tokens_per_s"), ",.0f")
        for value, spread in role.get("values", {}).items():
            facts[printable_text(value)] = format_number(spread["mean"])
        lines.append(_labelled_values(facts))
    if rollouts is not None:
        facts = {
            "version": format_number(rollouts["published"], ",d"),
            "ready prompts": format_number(rollouts["ready"], ",d"),
            "lag": format_number(rollouts["lag_max"], ",d"),
        }
        lines.append(_labelled_values(facts))
    return Group(*lines)


def _streams_table(now: Snapshot) -> RenderableType:
    """Renders the sources of the job's streams, those with the largest shares first."""
    ordered = sorted(now["streams"].items(), key=lambda source: -source[1]["share"])
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("source", overflow="ellipsis", no_wrap=True)
    for head in ("share", "samples/s", "read/s", "found in memory"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, source in ordered[:_MAX_SOURCES]:
        table.add_row(
            Text(printable_text(name)),
            format_number(source["share"], ".1%"),
            format_number(source.get("samples_per_s"), ",.4g"),
            format_size(source.get("bytes_per_s")),
            format_number(source.get("hit_ratio"), ".1%"),
        )
    if (more := len(ordered) - _MAX_SOURCES) > 0:
        table.add_row(Text(f"and {count_of(more, 'source')} more", "dim"))
    ratio = now["progress"].get("data_wait_ratio")
    waiting = "-" if ratio is None else f"{ratio:.1%} of a step"
    return Group(table, _labelled_values({"waiting for data": waiting}))


def _training_panel(now: Snapshot) -> RenderableType:
    training = now["training"]
    losses = [loss for _, loss in now["loss"]]
    loss_scale = None if training["loss_scale"] == 1 else training["loss_scale"]
    facts = {
        "loss": format_number(training["loss"]),
        "learning rate": format_number(training["learning_rate"]),
        "gradient norm": format_number(training["gradient_norm"]),
        "loss scale": format_number(loss_scale, "g"),
        "flops used": format_number(training["model_flops_utilization"], ".1%"),
    }
    curve = Text(sparkline(losses, BAR_WIDTH), "cyan")
    return Group(curve, _labelled_values(facts), *_world_size_rows(now))


def _world_size_rows(now: Snapshot) -> Iterator[RenderableType]:
    """Yields the world size over time as a bar chart, and a line with marks for faults."""
    began, until = now["began_s"], max(now["at_s"], now["began_s"] + 1e-9)

    def column(at_s: float) -> int:
        return min(BAR_WIDTH - 1, max(0, int((at_s - began) / (until - began) * BAR_WIDTH)))

    sizes = [0] * BAR_WIDTH
    for generation in now["generations"]:
        start = column(generation["at_s"])
        sizes[start:] = [generation["world_size"]] * (BAR_WIDTH - start)
    if (largest := max(sizes)) > 0:
        blocks = "".join(" ▁▂▃▄▅▆▇█"[round(8 * size / largest)] for size in sizes)
        yield Text.assemble((blocks, "blue"), (f" {sizes[-1]}", "dim"))
        if columns := {column(fault["at_s"]) for fault in now["faults"]}:
            marks = "".join("x" if index in columns else " " for index in range(BAR_WIDTH))
            number = count_of(len(now["faults"]), "fault")
            yield Text.assemble((marks, "bold red"), (f" {number}", "dim"))


def _goodput_bar(goodput: dict[str, Any]) -> RenderableType:
    seconds = {**goodput["seconds"], "in progress": goodput["unattributed_s"]}
    ordered = sorted(seconds, key=lambda cause: (cause != "productive", -seconds[cause]))
    causes = [cause for cause in ordered if seconds[cause] > 0]
    widths = split_width([seconds[cause] for cause in causes], BAR_WIDTH)
    bar, legend = Text(), []
    for cause, width in zip(causes, widths, strict=True):
        fallback = "magenta" if cause.startswith("recovery") else "white"
        style = _CATEGORY_STYLES.get(cause, fallback)
        bar.append("█" * width, style)
        duration = f" {format_duration(seconds[cause])}"
        legend.append(Text.assemble(("█ ", style), printable_text(cause), (duration, "dim")))
    bar.append(f" {goodput['ratio']:.1%}", "bold")
    return Group(bar, Columns(legend, padding=(0, 2)))


def _rank_tiles(ranks: list[dict[str, Any]]) -> RenderableType:
    if not ranks:
        return Text("no rank has reported yet", "dim")
    if len(ranks) > _MAX_RANK_TILES:
        phases = Counter(printable_text(rank["phase"] or "unknown") for rank in ranks)
        silent = sum((rank["silent_s"] or 0.0) >= SILENT_RANK_S for rank in ranks)
        counts = Text("   ").join(
            Text.assemble(("■ ", _PHASE_STYLES.get(phase, "white")), f"{phase} {number}")
            for phase, number in sorted(phases.items())
        )
        return Group(counts, Text(f"{silent} silent", "red")) if silent else counts
    return Columns([_rank_tile(rank) for rank in ranks], padding=(0, 2))


def _rank_tile(rank: dict[str, Any]) -> Text:
    phase = printable_text(rank["phase"] or "unknown")
    waiting = " (waiting)" if rank["waiting"] else ""
    tile = Text.assemble(
        ("■ ", _PHASE_STYLES.get(phase, "white")), f"{rank['rank']} {phase}{waiting}"
    )
    if (rank["silent_s"] or 0.0) >= SILENT_RANK_S:
        tile.append(f" silent {format_duration(rank['silent_s'])}", "bold red")
    return tile


_RECOVERED = {"repair": "repaired", "resize": "resized", "reattach": "re-attached"}


def _events_table(now: Snapshot) -> RenderableType:
    role_faults = (role.get("seen_faults", ()) for role in now.get("roles", {}).values())
    rows = [
        (fault["at_s"], Text(printable_text(fault["cause"]), "red"), printable_text(fault["text"]))
        for fault in chain(now["faults"], *role_faults)
    ]
    for event in now["recoveries"]:
        kind = _RECOVERED.get(event["kind"], event["kind"])
        sizes = f"{event['world_size_before']} -> {event['world_size']} ranks"
        text = f"in {format_duration(event['total_s'])}: {sizes} after step {event['step']:,}"
        rows.append((event["at_s"], Text(kind, "green"), text))
    if not rows:
        return Text("no faults, no resizes", "dim")
    table = Table.grid(padding=(0, 2))
    for at_s, label, text in sorted(rows, key=lambda row: -row[0])[:_MAX_EVENTS]:
        table.add_row(Text(_clock_text(at_s), "dim"), label, Text(text))
    return table


def _checkpoints_table(now: Snapshot) -> RenderableType:
    replica = now["replicas"]
    step = "none" if replica["step"] is None else f"step {replica['step']:,}"
    text = Text.assemble(("replica ", "dim"), f"{step}, {format_size(replica['bytes'])}")
    if now["checkpoint_failures"]:
        text.append(f"   {now['checkpoint_failures']} failed write attempts", "yellow")
    rows = [
        Text.assemble(
            (f"{_clock_text(entry['at_s'])}  ", "dim"),
            f"step {entry['step']:,}, {format_size(entry['bytes'])}"
            f" in {format_duration(entry['seconds'])}",
        )
        for entry in reversed(now["checkpoints"][-_MAX_CHECKPOINTS:])
    ]
    return Group(text, *(rows or [Text("no checkpoint written by this run", "dim")]))


def _step_text(now: Snapshot) -> str:
    progress = now["progress"]
    total = f"/{progress['steps']:,}" if progress["steps"] else ""
    return f"step {progress['step']:,}{total}"


def _clock_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S")
