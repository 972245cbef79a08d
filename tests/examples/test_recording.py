"""The recording of README.md is a whole run with a kill, drawn by `tools.recording`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.house.source import ROOT
from tools.recording import draw

TEXT = "{http://www.w3.org/2000/svg}text"
ANIMATE = "{http://www.w3.org/2000/svg}animate"


def test_lines_appear_at_their_times_and_are_escaped() -> None:
    lines = [(0.0, "$ run"), (30.0, "fault: <rank 1> & more"), (55.0, "x" * 200)]
    texts = list(ElementTree.fromstring(draw(lines)).iter(TEXT))
    assert [text.text for text in texts] == ["$ run", lines[1][1], "x" * 103 + "…"]
    times = [text.find(ANIMATE).get("keyTimes") for text in texts]  # type: ignore[union-attr]
    assert times == ["0;0.0000", "0;0.5000", "0;0.9167"]


def test_long_run_is_played_faster_and_says_so() -> None:
    texts = list(ElementTree.fromstring(draw([(0.0, "a"), (120.0, "b")])).iter(TEXT))
    assert [text.text for text in texts] == ["a", "b", "(120 s, played 2.0 times as fast)"]


def test_recording_shows_a_kill_its_repair_and_the_end() -> None:
    drawn = (ROOT / "docs/demo.svg").read_text(encoding="utf-8")
    lines = "\n".join(text.text or "" for text in ElementTree.fromstring(drawn).iter(TEXT))
    killed = re.search(r"\$ kill -9 (\d+)", lines)
    assert killed is not None
    assert f"(pid {killed[1]}) was lost" in lines
    assert re.search(r"repaired in [\d.]+ s: 2 -> 1 workers after step \d+, no step", lines)
    assert re.search(r"resized in .* 1 -> 2 workers", lines)
    assert re.search(r"succeeded: (\d+) steps", lines)
