"""One browser for all tests of the page; without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.orchestrator.page.browser import Browser, start_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Browser:
    """On an empty page: that of the last test would still poll its closed server."""
    browser.open("about:blank")
    browser.wait_for("location.href == 'about:blank'")
    browser.errors.clear()
    return browser
