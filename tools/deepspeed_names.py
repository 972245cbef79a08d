"""Writes docs/deepspeed-names.md: which of DeepSpeed's names work, and what replaces the others.

`python -m tools.deepspeed_names`. A test compares the page with `render()`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from rayzero.deepspeed.lookup import MODULES, REFUSED, REFUSED_PACKAGES, working_names
from tools.deepspeed_surface import FILE

PAGE = Path(__file__).parents[1] / "docs/deepspeed-names.md"
ATTRIBUTES = {
    "DeepSpeedEngine": ("DeepSpeedEngine", "engine"),
    "Accelerator": ("get_accelerator()", "accelerator"),
}
"""{kind of names that are refused: (title, the surface's key)}."""
HEAD = """# DeepSpeed's names

Written by `python -m tools.deepspeed_names` from `rayzero/deepspeed/names.toml`; tests import every
name and check what the page says. Config keys have [a table of their own](config.md).

*Works*: the name is there and does what DeepSpeed's does, as far as
[From DeepSpeed](from-deepspeed.md) does not say otherwise. *Refused*: a name of a module can be
imported, and raises `ConfigError`, a `ValueError`, in one line when it is called; an attribute of
the engine or the accelerator is an `AttributeError` with the same line, so that `hasattr` is False.
"""


def code(names: Iterable[str]) -> str:
    """Names as a list in a cell."""
    return ", ".join(f"`{name}`" for name in names)


def by_use(refused: Mapping[str, str]) -> list[str]:
    """Rows of a table of refused names: what to use, and for which."""
    names = defaultdict(list)
    for name, use in refused.items():
        names[use].append(name)
    return [f"| {use} | {code(sorted(names[use]))} |" for use in sorted(names)]


def render() -> str:
    """The page."""
    surface = json.loads(FILE.read_text())
    lines = [HEAD, "## Modules", "", "| module | works |", "|---|---|"]
    lines += [
        f"| `{'.'.join(filter(None, ('deepspeed', module)))}` | {code(names)} |"
        for module in ("", *MODULES)
        if (names := working_names(module))
    ]
    lines += ["", "| use | instead of |", "|---|---|"]
    lines += by_use(
        {
            ".".join(filter(None, (module, name))): use
            for module, names in REFUSED.items()
            if module not in ATTRIBUTES
            for name, use in names.items()
        }
        | {f"{module}.*": use for module, use in REFUSED_PACKAGES.items()}
    )
    for kind, (title, key) in ATTRIBUTES.items():
        refused = REFUSED[kind]
        works = [name for name in surface[key] if name not in refused]
        lines += ["", f"## {title}", "", f"Works: {code(works)}.", "", "| use | instead of |"]
        lines += ["|---|---|", *by_use(refused)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
