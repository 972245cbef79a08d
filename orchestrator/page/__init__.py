"""The live page of a job: one HTML file, assembled from the sources in this folder.

It reads /snapshot.json and /history.json, and cannot change the job.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

STYLES = ("page.css",)
SCRIPTS = ("format.js", "charts.js", "parts.js", "curves.js", "page.js")
CONTENT_TYPE = "text/html; charset=utf-8"


@cache
def render_page() -> str:
    """The HTML text. Its content security policy allows its own style and script, by their hashes,
    and requests to its own origin."""
    style, script = _concat_assets(STYLES), _concat_assets(SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = _read_asset("page.html")
    for mark, content in (("POLICY", policy), ("STYLE", style), ("SCRIPT", script)):
        text = text.replace(f"@@{mark}@@", content)
    return text


def page_response() -> tuple[str, bytes]:
    """(content type, body)."""
    return CONTENT_TYPE, render_page().encode()


def _concat_assets(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read_asset(name) for name in names)


def _read_asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """The source expression for an inline style or script in a content security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
