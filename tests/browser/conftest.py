"""Chromium by Playwright, and what it opens: a report and a site, each made once."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sparsebench.reports.page import content
from sparsebench.reports.site.pages import stylesheet
from tests.tools.command_line import output
from tests.tools.paths import PUBLISHED

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENS = [(1280, "light"), (400, "dark")]  # width and colors
SIMULATED = """\
schema: sparsebench/suite@1
title: <script>alert("a title")</script> 'quoted' & "quoted"/slashed
problems:
  - op: linear
    m: [16, 4096]
    shape: [{n: 4096, k: 4096}]
    dtype: bf16
    pattern: blocks
    block: [16, 64]
    sparsity: [0.5, 0.9]
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  - {format: bsr, kernel: torch_bsr, params: {block: $block}}
baselines:
  - {format: dense, kernel: cublas}
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip without a browser; under `make browser` that is an error."""
    missing = [name for name in ("playwright", "axe_playwright_python") if not find_spec(name)]
    missing += [] if CHROMIUM else ["chromium"]
    pages = [item for item in items if item.get_closest_marker("browser")]
    if missing and pages and config.option.browser_required:
        raise pytest.UsageError(f"tests/browser: expected {', '.join(missing)}, found none")
    for item in pages if missing else ():
        reason = f"needs {', '.join(missing)}: make browser"
        item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Seen:
    """An open page with its console messages and its requests."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def assert_fits(self, width: int) -> None:
        """Check that the page is no wider, logs no error, and breaks no rule of axe."""
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        assert not self.errors
        assert not self.violations()

    def violations(self) -> list[tuple[str, str]]:
        """Return the rules of axe that elements of the page break, with the element's HTML."""
        from axe_playwright_python.sync_playwright import Axe

        rules = Axe().run(self.page).response["violations"]
        return [(rule["id"], node["html"][:120]) for rule in rules for node in rule["nodes"]]


Show = Callable[..., Seen]


def write_page(folder: Path, name: str, text: str) -> Path:
    """Write a page of a site, with its styles and scripts, and return its path."""
    (folder / "style.css").write_text(stylesheet(), "utf-8")
    (folder / "report.js").write_text(content("report.js"), "utf-8")
    (folder / name).write_text(text, "utf-8")
    return folder / name


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """Return a function that opens a file: show(path, width=, colors=, media=, address=)."""
    opened = []

    def open_(
        path: Path,
        width: int = 1280,
        colors: str = "light",
        media: str = "screen",
        address: str = "",
    ) -> Seen:
        page = browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme=colors, offline=True
        )
        opened.append(page)
        seen = Seen(page)
        page.on(
            "console", lambda message: message.type == "error" and seen.errors.append(message.text)
        )
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.emulate_media(media=media)
        page.goto(path.as_uri() + address)
        return seen

    yield open_
    for page in opened:
        page.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a simulated run, whose title attacks the page, and published ones of each op."""
    folder = tmp_path_factory.mktemp("runs")
    suite = folder / "attack.yaml"
    suite.write_text(SIMULATED)
    output("run", suite, "--device", "sim", "--replicates", 2, "--out", folder / "sim")
    names = ["dlmc", "ffn-step", "sparsity-4096", "sparsity-4096-confirmed"]
    names += ["spense-prefill", "decoder-whole", "attention-2017"]
    return [folder / "sim", *(PUBLISHED / "nvidia-h200" / name for name in names)]


@pytest.fixture(scope="session")
def report(runs: list[Path]) -> Path:
    return runs[0] / "report.html"


@pytest.fixture(scope="session")
def site(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    output("publish", *runs, "--out", folder)
    return folder
