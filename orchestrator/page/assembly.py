"""The page as it is served: one HTML file that asks for nothing but /snapshot.json."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

STYLES = ("page.css",)
SCRIPTS = ("words.js", "charts.js", "parts.js", "page.js")
KIND = "text/html; charset=utf-8"


@cache
def page() -> str:
    """The file's text. Its policy lets only its own style and script run, named by their hashes,
    and lets it read from where it came from."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    text = _read("page.html")
    for mark, part in (("POLICY", policy), ("STYLE", style), ("SCRIPT", script)):
        text = text.replace(f"@@{mark}@@", part)
    return text


def served() -> tuple[str, bytes]:
    """(content type, body)."""
    return KIND, page().encode()


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read(name) for name in names)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names an inline script."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
