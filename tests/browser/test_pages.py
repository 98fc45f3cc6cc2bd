"""Reports and a site, as a reader sees them: in Chromium, without a network."""

import re
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from sparsebench.reports.comparison import compare_sides, html
from sparsebench.reports.site.pages import Site
from sparsebench.results.comparison.sides import side
from sparsebench.results.run import store
from tests.tools.command_line import output
from tests.tools.paths import PUBLISHED

pytestmark = pytest.mark.browser

GPUS = "nvidia-h200", "nvidia-h100-80gb-hbm3"
PAGES = ["report", "site", "runs", "run", "format", "kernel", "claims", "claim"]
PAGES += ["glossary", "welcome", "comparison"]
WAYS = [(1280, "light", "screen"), (400, "dark", "screen"), (1280, "light", "print")]


@pytest.fixture(scope="session")
def places(report: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    among = tmp_path_factory.mktemp("among")  # to read all runs takes 20 s
    for gpu, name in product(GPUS, ("attention-causal", "ffn", "quick", "sparsity-4096")):
        copytree(PUBLISHED / gpu / name, among / gpu / name)
    comparison = among / "page.html"
    output("compare", "H100", "H200", "--html", comparison, "--among", among)
    result = compare_sides([side(store.read(among / gpu / "quick"), name="quick") for gpu in GPUS])
    compared = site.parent / "compared.html"  # beside the site, which does not have these runs
    compared.write_text(html(result, Site(), f"{site.name}/"))
    return {
        "comparison": comparison,
        "compared": compared,
        "glossary": site / "glossary.html",
        "welcome": site / "welcome.html",
        "report": report,
        "site": site / "index.html",
        "runs": site / "runs.html",
        "run": site / "h200" / "sparsity-4096" / "index.html",
        "patterns": site / "h200" / "dlmc" / "index.html",
        "step": site / "h200" / "ffn-step" / "index.html",
        "claims": site / "claims" / "index.html",
        "claim": site / "claims" / "torch-bsr-blog.html",
        "format": site / "formats" / "bsr.html",
        "kernel": site / "kernels" / "bsr_triton.html",
    }


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "colors", "media"), WAYS)
def test_a_page_logs_nothing_loads_nothing_and_fits(name, width, colors, media, places, show):
    seen = show(places[name], width, colors, media)
    opened = "() => document.querySelectorAll('details').forEach((each) => (each.open = true))"
    folded = seen.page.evaluate("document.documentElement.scrollWidth")
    seen.page.evaluate(opened)
    assert folded <= width
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not seen.errors
    assert seen.requests
    assert all(url.startswith(("file:", "data:", "blob:")) for url in seen.requests)


@pytest.mark.parametrize("name", [*PAGES, "compared"])
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_finds_nothing(name: str, colors: str, places: dict[str, Path], show: Any) -> None:
    assert not show(places[name], colors=colors).violations()[:5]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_first_screen_of_a_report_has_the_answer_and_a_map(width, places, show) -> None:
    page = show(places["run"], width).page
    for place in (".badge", "#answer .answers li", "#answer .map"):
        top = page.evaluate(f"document.querySelector('{place}').getBoundingClientRect().top")
        assert top < 800, place
    assert page.locator("#answer svg").count() >= 1


def test_the_first_page_is_one_screen_with_a_finding_and_a_grid(places, show) -> None:
    page = show(places["site"]).page
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    view = page.locator(".view:visible")
    assert view.locator(".finding").inner_text().startswith("Faster than dense: blocks")
    rows = view.get_by_role("rowheader").all_inner_texts()
    assert rows == [*(f"blocks of {size}" for size in (128, 64, 32, 16)), "half 2:4", "CSR"]
    heads = page.locator(".view:visible .steps b").all_inner_texts()
    assert heads == ["Should I prune?", "Model, decoding:", "Attention, blocks given:"]
    href = view.locator("a.cell").first.get_attribute("href")
    assert href is not None
    assert href.startswith("h200/sparsity-4096/index.html#case-")
    assert page.get_by_role("link", name="Should I prune?").count() == 1
    view.locator("a.cell").first.click()
    page.locator("tr:target").wait_for()  # visible, once the page has opened the parts around it
    assert "sparsebench try" in page.locator("aside.card").inner_text()


@pytest.mark.parametrize("tokens", ["4096", "3000", "1e9"])
def test_an_address_opens_the_chosen_gpu_and_the_nearest_tokens(tokens, places, show) -> None:
    page = show(places["site"], address=f"#gpu=NVIDIA+H200&tokens={tokens}").page
    assert page.locator(".view:visible table").get_attribute("data-tokens") == "4096"
    said = page.locator(".choose output").inner_text()
    assert said.startswith(f"Nothing was measured with tokens = {tokens}.") == (tokens != "4096")


def test_a_fragment_that_names_no_place_is_ignored(places, show) -> None:
    assert show(places["site"], address="#%").errors == []


def test_a_shape_is_a_choice_of_the_first_page_and_a_cell_names_its_kernel(places, show) -> None:
    page = show(places["site"]).page
    select = page.locator(".choose select[name=shape]")
    shapes = select.locator("option").evaluate_all("all => all.map((each) => each.value)")
    assert shapes[0] == select.input_value() == "all"
    assert len(shapes) > 1
    select.select_option(shapes[1])
    shown = page.locator(".view:visible")
    assert shapes[1] in shown.locator(".note").inner_text()
    assert f"shape={shapes[1].split(' ')[0]}" in page.evaluate("location.hash")
    assert "bsr_" in shown.locator("a.cell").first.inner_text()


def test_a_cell_opens_a_card_with_rivals_in_order_and_commands(places, show) -> None:
    page = show(places["run"]).page
    page.locator("a[data-cell][title^='blocks of 32 at 90 %']:visible").click()
    card = page.locator("aside.card")
    assert card.is_visible()
    times = [float(text.split(" ")[0].replace(",", "")) for text in
             card.locator("tbody td:nth-child(2)").all_inner_texts()]  # fmt: skip
    assert len(times) > 3
    assert times == sorted(times)
    run, trial = card.locator("code").all_inner_texts()
    assert run.startswith('sparsebench run sparsity --only "')
    assert {"block=32", "sparsity=0.9", "m=4096"} <= {*run.split('"')[1].split()}
    assert trial.startswith("sparsebench try bsr_small ")
    assert "tuned" not in trial
    address = card.locator("tbody a", has_text="torch_bsr").first.get_attribute("href")
    linked = show(places["run"], address=address).page.locator("aside.card code").last.inner_text()
    assert linked.startswith("sparsebench try torch_bsr ")
    assert linked.endswith(" tuned=True")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    card.get_by_role("button", name="close").click()
    assert not card.count()
    page.locator("a[data-cell][title^='blocks of 128 at 50 %']:visible").click()
    assert card.locator("code").last.inner_text().startswith("sparsebench try bsr_wgmma ")
    page.keyboard.press("Escape")
    assert not card.count()


@pytest.mark.parametrize("words", ["m:4096", "4096", "dtype:bf16", "bf16"])
def test_a_filter_finds_the_values_that_all_lines_share(words, places, show) -> None:
    page = show(places["run"], address=f"#q={words}").page
    shown, count = page.locator("#cases output").inner_text().split(" of ")
    assert shown == count


@pytest.mark.parametrize("words", ["90 %", "90%", "sparsity:90"])
def test_a_filter_finds_a_percentage(words: str, places: dict[str, Path], show: Any) -> None:
    page = show(places["run"]).page
    page.locator("#cases details").evaluate("(details) => (details.open = true)")
    page.locator("#cases input[name=q]").fill(words)
    shown, count = map(int, page.locator("#cases output").inner_text().split(" of "))
    assert 0 < shown < count


def test_pages_of_formats_have_a_filter(places: dict[str, Path], show: Any) -> None:
    page = show(places["format"]).page
    page.locator("#cases summary").evaluate("summary => (summary.parentElement.open = true)")
    page.locator("#cases input[name=q]").fill("block:128 speedup:>2")
    rows = page.locator("#cases tbody tr:visible")
    assert rows.count() > 2
    assert all("×" in text for text in rows.all_inner_texts())
    assert {*page.locator("#cases tbody tr:visible td:nth-child(8)").all_inner_texts()} == {"128"}


def test_times_are_sorted_by_their_length_in_any_unit(places: dict[str, Path], show: Any) -> None:
    numbers = show(places["format"]).page.evaluate("['9.12 µs', '1.05 ms', '2 s'].map(number)")
    assert numbers == [9.12, 1050, 2e6]


def test_an_old_address_leads_to_the_run(site: Path, show: Any) -> None:
    olds = site.glob("runs/nvidia-h200-sparsity-*/index.html")
    old = next(page for page in olds if "h200/sparsity-4096/" in page.read_text("utf-8"))
    page = show(old).page
    page.wait_for_url("**/h200/sparsity-4096/index.html")
    assert page.locator(".headline").is_visible()


def test_a_run_shows_its_evidence_and_three_groups(places: dict[str, Path], show: Any) -> None:
    page = show(places["run"]).page
    assert re.match(r"[\d.]+× \[[\d.]+, [\d.]+\]", page.locator(".headline b").inner_text())
    assert "hardware limit" in page.locator(".headline").inner_text()
    assert "sparsebench run sparsity" in page.locator(".again").inner_text()
    heads = page.locator(".group > h2").all_inner_texts()
    assert heads == ["Efficiency", "Trust", "Data"]


def test_no_two_texts_of_a_chart_overlap(places: dict[str, Path], show: Any) -> None:
    page = show(places["run"]).page
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    overlapping = """() => [...document.querySelectorAll('svg[role=img]')].flatMap((svg) => {
      const boxes = [...svg.querySelectorAll('text')]
        .map((text) => [text.textContent, text.getBoundingClientRect()]);
      return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
        .filter(([b, q]) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
                         && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4)
        .map(([b]) => `${svg.getAttribute('aria-label')}: ${a} | ${b}`));
    })"""
    assert not page.evaluate(overlapping)[:5]


def test_on_a_narrow_screen_every_value_of_a_line_is_visible(places, show) -> None:
    out = "(all) => all.filter((each) => each.getBoundingClientRect().right > 400).length"
    for name, lines in (("runs", ".runs td, .runs .badge"), ("run", "#cases td")):
        page = show(places[name], 400).page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert page.locator(lines).count() > 3
        assert page.locator(lines).evaluate_all(out) == 0
    page = show(places["patterns"], 400).page
    cells = page.locator("#answer .map td:visible")
    assert cells.count() > 10
    assert cells.evaluate_all(out) == 0


@pytest.mark.parametrize("name", ["site", "patterns"])
def test_a_narrow_screen_shows_the_interval_of_each_speedup(name, places, show) -> None:
    spans = ".map .span"
    page = show(places[name], 400).page
    view = page.locator(".view:visible")
    assert view.locator(spans).count() > 3
    assert view.locator(f"{spans}:visible").count() == view.locator(spans).count()


def test_a_choice_is_kept_in_the_address_and_restored_from_it(places, show) -> None:
    page = show(places["step"]).page
    select = page.locator(".choose select").first
    name = select.get_attribute("name")
    current = select.input_value()
    values = select.locator("option").evaluate_all("all => all.map((each) => each.value)")
    choice = next(value for value in values if value != current)
    before = page.locator(".view:visible").inner_text()
    select.select_option(choice)
    address = page.evaluate("location.hash")
    assert f"{name}=" in address
    after = page.locator(".view:visible").inner_text()
    assert after != before
    again = show(places["step"], address=address).page
    assert again.locator(".choose select").first.input_value() == choice
    assert again.locator(".view:visible").inner_text() == after


@pytest.mark.parametrize("name", ["slidesparse-2026", "openai-2017-text-and-images"])
def test_paths_and_badges_of_a_claim_fit_a_phone(name: str, site: Path, show: Any) -> None:
    page = show(site / "claims" / f"{name}.html", 400).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_name_that_is_a_script_is_text(places: dict[str, Path], show: Any) -> None:
    for name in ("report", "site"):
        seen = show(places[name])
        assert not seen.page.evaluate(
            "[...document.scripts].filter((s) => /alert/.test(s.text)).length"
        )
    assert "<script>alert(" in show(places["report"]).page.locator("h1").inner_text()


class Links(HTMLParser):
    """Collects the addresses that a page links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.page, self.addresses = page, set[str]()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.addresses.add(urldefrag(urljoin(self.page.as_uri(), href)).url)


def test_every_link_within_the_site_leads_to_a_file(site: Path) -> None:
    """Scripts add links within their page only, so this needs no browser, which takes 30 s."""
    pages = [Links(path) for path in site.rglob("*.html")]
    addresses = {address for page in pages for address in page.addresses}
    inside = [unquote(address) for address in addresses if address.startswith("file://")]
    assert len(inside) >= len(pages)
    assert not [path for path in inside if not Path(path.removeprefix("file://")).exists()]
