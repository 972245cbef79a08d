"""Live page: assembly (static files beside it).

The live page of a job: its sources, and what puts them together into one file.

The page knows /snapshot.json and nothing else. It shows; it has no control.

The page as it is served: one HTML file that asks for nothing but /snapshot.json.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

STYLES = ("page.css",)


SCRIPTS = ("words.js", "charts.js", "parts.js", "page.js")


CONTENT_TYPE = "text/html; charset=utf-8"


@cache
def render_page() -> str:
    """The file's text. Its policy lets only its own style and script run, named by their hashes,
    and lets it read from where it came from."""
    style, script = _concat_assets(STYLES), _concat_assets(SCRIPTS)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_csp_hash(style)}'",
            f"script-src '{_csp_hash(script)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    text = _read_asset("page.html")
    for mark, part in (("POLICY", policy), ("STYLE", style), ("SCRIPT", script)):
        text = text.replace(f"@@{mark}@@", part)
    return text


def page_response() -> tuple[str, bytes]:
    """(content type, body)."""
    return CONTENT_TYPE, render_page().encode()


def _concat_assets(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read_asset(name) for name in names)


def _read_asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """As a content security policy names an inline script."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
