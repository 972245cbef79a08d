"""The recording of README.md is a whole run with a kill, drawn by `tools.recording`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.house.source import ROOT

TEXT = "{http://www.w3.org/2000/svg}text"


def test_recording_shows_a_kill_its_repair_and_the_end() -> None:
    drawn = (ROOT / "docs/demo.svg").read_text(encoding="utf-8")
    lines = "\n".join(text.text or "" for text in ElementTree.fromstring(drawn).iter(TEXT))
    killed = re.search(r"\$ kill -9 (\d+)", lines)
    assert killed is not None
    assert f"(pid {killed[1]}) was lost" in lines
    assert re.search(r"repaired in [\d.]+ s: 2 -> 1 workers after step \d+, no step", lines)
    assert re.search(r"resized in .* 1 -> 2 workers", lines)
    assert re.search(r"succeeded: (\d+) steps", lines)
