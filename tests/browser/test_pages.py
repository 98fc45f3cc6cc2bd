"""Reports and a site, as a reader sees them: in Chromium, without a network."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

PAGES = ["report", "site", "run", "format", "kernel"]
WAYS = [(1280, "light", "screen"), (400, "light", "screen"), (1280, "dark", "screen")]
WAYS += [(400, "dark", "screen"), (1280, "light", "print")]


@pytest.fixture(scope="session")
def places(report: Path, site: Path) -> dict[str, Path]:
    (published,) = site.glob("runs/nvidia-h200-*/index.html")
    return {
        "report": report,
        "site": site / "index.html",
        "run": published,
        "format": site / "formats" / "bsr.html",
        "kernel": site / "kernels" / "bsr_triton.html",
    }


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "colors", "media"), WAYS)
def test_a_page_logs_nothing_loads_nothing_and_fits(
    name: str, width: int, colors: str, media: str, places: dict[str, Path], show: Any
) -> None:
    seen = show(places[name], width, colors, media)
    opened = "() => document.querySelectorAll('details').forEach((each) => (each.open = true))"
    folded = seen.page.evaluate("document.documentElement.scrollWidth")
    seen.page.evaluate(opened)
    assert folded <= width
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not seen.errors
    assert seen.requests
    assert all(url.startswith(("file:", "data:", "blob:")) for url in seen.requests)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_finds_nothing(name: str, colors: str, places: dict[str, Path], show: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = show(places[name], colors=colors).page
    found = Axe().run(page).response["violations"]
    said = [(rule["id"], node["html"][:120]) for rule in found for node in rule["nodes"]]
    assert not said[:5]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_first_screen_of_a_report_has_the_answer_and_a_map(
    width: int, places: dict[str, Path], show: Any
) -> None:
    page = show(places["run"], width).page
    for place in (".badge", "#answer .answers li", "#answer .map"):
        top = page.evaluate(f"document.querySelector('{place}').getBoundingClientRect().top")
        assert top < 800, place
    assert page.locator("#answer svg").count() >= 1


def test_the_first_screen_of_the_site_shows_which_format_wins(
    places: dict[str, Path], show: Any
) -> None:
    page = show(places["site"]).page
    simulated = page.locator("section", has_text="simulated H200")
    assert simulated.locator(".simulated").count() >= 1
    row = simulated.locator("tr", has=page.get_by_role("rowheader", name="m 16", exact=True)).first
    assert "BSR 64" in row.inner_text()
    assert page.get_by_role("heading", name="Where sparse formats beat dense").is_visible()
    assert page.locator("h1").bounding_box()["height"] > 10
    assert page.locator("#gpu-1 table").first.bounding_box()["y"] < 800


def test_on_a_narrow_screen_every_value_of_a_line_is_visible(
    places: dict[str, Path], show: Any
) -> None:
    out = "(all) => all.filter((each) => each.getBoundingClientRect().right > 400).length"
    for name, lines in (("site", ".runs td, .runs .badge"), ("run", "#winners td, #cases td")):
        page = show(places[name], 400).page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert page.locator(lines).count() > 3
        assert page.locator(lines).evaluate_all(out) == 0
    heads = page.locator("#winners td").first.evaluate(
        "(td) => getComputedStyle(td, '::before').content"
    )
    assert "problem" in heads


def test_a_choice_is_kept_in_the_address_and_restored_from_it(
    places: dict[str, Path], show: Any
) -> None:
    page = show(places["run"]).page
    select = page.locator(".choose select").first
    name = select.get_attribute("name")
    current = select.input_value()
    values = select.locator("option").evaluate_all("all => all.map((each) => each.value)")
    wanted = next(value for value in values if value != current)
    before = page.locator(".view:visible").inner_text()
    select.select_option(wanted)
    address = page.evaluate("location.hash")
    assert f"{name}=" in address
    after = page.locator(".view:visible").inner_text()
    assert after != before
    again = show(places["run"], address=address).page
    assert again.locator(".choose select").first.input_value() == wanted
    assert again.locator(".view:visible").inner_text() == after


def test_a_name_that_is_a_script_is_text(places: dict[str, Path], show: Any) -> None:
    for name in ("report", "site"):
        seen = show(places[name])
        assert not seen.page.evaluate(
            "[...document.scripts].filter((s) => /alert/.test(s.text)).length"
        )
    assert "<script>alert(" in show(places["report"]).page.locator("h1").inner_text()


def test_every_link_within_the_site_leads_to_a_file(site: Path, show: Any) -> None:
    dead = []
    for path in sorted(site.rglob("*.html")):
        page = show(path).page
        links = page.evaluate("[...document.querySelectorAll('a[href]')].map((a) => a.href)")
        files = {link.partition("#")[0] for link in links if link.startswith("file://")}
        dead += [link for link in files if not Path(link.removeprefix("file://")).exists()]
        page.close()
    assert not dead
