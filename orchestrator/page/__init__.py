"""The live page of a job, and of all jobs: one HTML file, assembled from the sources here.

The page reads /snapshot.json and /history.json (the page of all jobs also /jobs.json), and cannot
change a job.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

STYLES = ("page.css",)
SCRIPTS = (
    "format.js",
    "charts.js",
    "parts.js",
    "curves.js",
    "roles.js",
    "streams.js",
    "jobs.js",
    "page.js",
)
CONTENT_TYPE = "text/html; charset=utf-8"


@cache
def render_page(all_jobs: bool = False) -> str:
    """Returns the page of one job's endpoint, or of `rayzero page`. Its content security policy
    allows its own style and script, by their hashes, and requests to its own origin."""
    style, script = _concat_assets(STYLES), _concat_assets(SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = _read_asset("page.html")
    scope = "jobs" if all_jobs else "job"
    marks = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "SCOPE": scope}
    for mark, content in marks.items():
        text = text.replace(f"@@{mark}@@", content)
    return text


def page_response(all_jobs: bool = False) -> tuple[str, bytes]:
    """Returns the content type and the body of the page."""
    return CONTENT_TYPE, render_page(all_jobs).encode()


def _concat_assets(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read_asset(name) for name in names)


def _read_asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """Returns the expression for an inline style or script in a content security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
