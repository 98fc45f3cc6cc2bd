"""A site keeps the runs that were added, hides users and hosts, and reports bad input."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from sparsebench._writing import locked_folder, write_file
from sparsebench.errors import ResultError
from sparsebench.reports.build import Surrounding
from sparsebench.reports.site import run_folder
from sparsebench.reports.site.cards import Card, card
from sparsebench.reports.site.devices import find_devices
from sparsebench.reports.site.pages import Site, page_of, pages
from sparsebench.reports.site.publish import publish
from sparsebench.results.run import bundle, store
from sparsebench.results.tables.analysis import analyse
from tests.tools.command_line import refusal
from tests.tools.paths import PUBLISHED

STEP = PUBLISHED / "nvidia-h200" / "ffn-step"
NAMED = "<script>alert(1)</script> \"quoted\" 'name'/slash" + 200 * "x"


def unchecked(run: Path) -> None:
    """Accept every run; another test covers refusals."""


def copied(to: Path, **environment: str) -> Path:
    """Return a copy of a published run with another environment."""
    shutil.copytree(STEP, to)
    file = to / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **environment}))
    bundle.seal(to)
    return to


def card_of(run: Path) -> Card:
    place = dict.fromkeys(("address", "slug", "identity", "origin", "name", "commit"), "x")
    return card(analyse(store.read(run)), [], **place)


@pytest.fixture(scope="module")
def gain() -> str:
    """Return the gain of STEP as pages write it: 1.61×."""
    return card_of(STEP).gain.split()[0]


def test_a_badge_names_the_chain_that_its_gain_is_of() -> None:
    decode = card_of(STEP.with_name("decode"))
    assert decode.gain.startswith("5.7× linear, ")
    assert "inside a chain" in decode.gain
    assert "scope" not in decode.gain


@pytest.mark.parametrize("badge", ["unreliable", "busy", "unfinished"])
def test_a_run_with_a_grave_badge_is_no_verdict(badge: str) -> None:
    step = card_of(STEP)
    assert step.verdict
    assert not replace(step, badges=[[badge, "", ""], *step.badges]).verdict


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("published") / "site"
    publish([STEP], to, Site(base="https://sparsebench.example/x/"), unchecked)
    return to


@pytest.fixture
def copy(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the site, to which runs are added without reports, which are slow."""
    monkeypatch.setattr(run_folder, "build", lambda *arguments, **more: None)
    return shutil.copytree(site, tmp_path / "site")


def only_step(run: Path) -> None:
    """Refuse every run but copies of STEP."""
    if not run.name.startswith("step"):
        raise ResultError(f"{run}: expected a step")


def test_a_refused_run_does_not_keep_the_others_out(copy: Path, tmp_path: Path) -> None:
    good = copied(tmp_path / "step-2", commit="2" * 40)
    refused = copied(tmp_path / "other", commit="3" * 40)
    unsealed = copied(tmp_path / "step-3", commit="4" * 40)
    (unsealed / "manifest.json").unlink()
    huge = copied(tmp_path / "step-4", commit="5" * 40)
    text = (huge / "run.json").read_text()
    (huge / "run.json").write_text(text.replace('"replicates": ', f'"replicates": {10**50}'))
    bundle.seal(huge)
    done = publish([unsealed, refused, good, huge], copy, Site(), only_step)
    assert len(done.slugs) == 2
    assert [run.partition(": expected ")[0] for run in done.refused] == [
        str(unsealed),
        str(huge / "run.json"),
        str(refused),
    ]
    before = (copy / ".state.json").read_text()
    with pytest.raises(ResultError, match="expected a step"):
        publish([refused], copy, Site(), only_step)
    assert (copy / ".state.json").read_text() == before


def test_a_confirmed_run_names_the_run_that_confirms_it(site, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sparsebench.reports.build.figures", list)
    to = shutil.copytree(site, tmp_path / "site")
    page = to / "h200" / "ffn-step" / "index.html"
    assert "Confirmed alone" not in page.read_text()
    done = publish([STEP.with_name("ffn-step-confirmed")], to, Site(), unchecked)
    assert len(done.written) == 2
    link = '<a href="../../h200/ffn-step-confirmed/index.html">'
    assert link + card_of(STEP.with_name("ffn-step-confirmed")).gain.split()[0] in page.read_text()
    confirming = (to / "h200" / "ffn-step-confirmed" / "index.html").read_text()
    assert 'Made from <a href="../../h200/ffn-step/index.html">' in confirming


def test_a_grid_is_confirmed_only_by_its_own_largest_gain(tmp_path, monkeypatch) -> None:
    """The run `decode-confirmed` measured one token, so it confirms no gain with 16 tokens."""
    monkeypatch.setattr(run_folder, "build", lambda *arguments, **more: None)
    runs = [PUBLISHED / "nvidia-h200" / name for name in ("decode", "decode-confirmed")]
    publish(runs, tmp_path / "site", Site(), unchecked)
    views = (tmp_path / "site" / "index.html").read_text().split('<section class="view"')[1:]
    confirmed = {
        re.findall(r'data-tokens="(\d+)"', view)[0]: "confirmed alone" in view for view in views
    }
    assert confirmed == {"1": True, "16": False}


def test_a_copy_that_was_killed_leaves_no_run(copy: Path) -> None:
    left = copy / run_folder.NEW / "torn"
    shutil.copytree(copy / "h200" / "ffn-step", left)
    assert len(publish([STEP], copy, Site(), unchecked).slugs) == 1
    assert not left.parent.exists()


def test_an_old_address_leads_to_the_run(site: Path) -> None:
    (old,) = (site / "runs").iterdir()
    assert 'url=../../h200/ffn-step/index.html"' in (old / "index.html").read_text()


def test_an_earlier_version_of_a_run_keeps_its_page(copy, tmp_path, monkeypatch) -> None:
    evidence = {}

    def build(run: object, file: Path, surrounding: Surrounding, **more: object) -> None:
        evidence[file.parent.name] = surrounding.evidence

    monkeypatch.setattr(run_folder, "build", build)
    later = copied(tmp_path / "later" / "ffn-step", commit="1" * 40)
    state = json.loads((later / "run.json").read_text())
    state["started"] = "2026-12-24T00:00:00+00:00"
    (later / "run.json").write_text(json.dumps(state))
    bundle.seal(later)
    publish([later], copy, Site(), unchecked)
    assert {path.name for path in (copy / "h200").iterdir()} == {"ffn-step", "ffn-step-2"}
    assert 'href="../../h200/ffn-step-2/index.html"' in evidence["ffn-step"]
    assert "newer run" not in evidence["ffn-step-2"]
    runs = (copy / "runs.html").read_text()
    assert re.findall(r'href="(h200/[\w-]+)/', runs) == ["h200/ffn-step-2"]
    badges = {path.name for path in (copy / "badges").glob("*.svg")}
    assert len(badges) == 2


def test_a_replaced_run_is_listed_but_the_search_has_the_others(tmp_path: Path) -> None:
    runs = [tmp_path / "h200/ffn-step", tmp_path / "h200/earlier/2026-11-25-84a765b/step"]
    for path in runs:
        copied(path)
    write_file(runs[1] / "suite.yaml", (runs[1] / "suite.yaml").read_text() + "# before\n")
    bundle.seal(runs[1])
    site = tmp_path / "site"
    publish(runs, site, Site(), unchecked)
    listed = re.findall(r'href="(h200/[\w-]+)/', (site / "runs.html").read_text())
    assert {*listed} == {"h200/ffn-step", "h200/step"}
    assert "h200/ffn-step" in (site / "cells.js").read_text()
    assert "h200/step" not in (site / "cells.js").read_text()


def test_a_replaced_run_of_other_cases_leads_to_the_one_of_its_name(tmp_path: Path) -> None:
    runs = [copied(tmp_path / path) for path in ("h200/ffn-step", "h200/earlier/DATE/ffn-step")]
    state = json.loads((runs[1] / "run.json").read_text())
    state["flags"]["only"] = "m=1"
    (runs[1] / "run.json").write_text(json.dumps(state))
    bundle.seal(runs[1])
    publish(runs, tmp_path / "site", Site(), unchecked)
    for page in (tmp_path / "site" / "h200").glob("*/index.html"):
        replaced = (page.parent / run_folder.REPLACED).exists()
        assert ("A newer run replaces this one" in page.read_text()) == replaced


def test_a_run_has_the_name_of_its_folder_and_a_badge_with_its_place(copy, gain, tmp_path) -> None:
    publish([copied(tmp_path / "node17-step", hostname="node17")], copy, Site(), unchecked)
    cards = [json.loads(f.read_text()) for f in copy.glob("*/*/summary.json")]
    assert {card["name"] for card in cards} == {"ffn-step"}  # of the other, its suite
    assert "node17" not in (copy / "index.html").read_text()
    assert all(card["gain"].startswith(f"{gain} ffn_step, ") for card in cards)


def test_a_site_has_pages_downloads_feed_and_citation(site: Path, gain: str) -> None:
    run = site / "h200" / "ffn-step"
    page = (run / "index.html").read_text()
    links = re.findall('href="([^"]*)"', page.partition('<section id="publication">')[2])
    sealed = {"manifest.json", "removed.json", "rows.jsonl.gz", "suite.yaml", "environment.json"}
    assert {"rows.csv.gz", "summary.json", *sealed} <= {*links}
    assert all((run / name).stat().st_size > 0 for name in links)
    assert bundle.verify(run)
    assert bundle.identity(run) == bundle.identity(STEP)
    assert len(pd.read_csv(run / "rows.csv.gz")) == len(store.read(run).rows)
    feed = ElementTree.parse(site / "feed.xml").getroot()
    atom = "{http://www.w3.org/2005/Atom}"
    (entry,) = feed.findall(f"{atom}entry")
    assert entry.findtext(f"{atom}id") == f"urn:sha256:{bundle.identity(STEP)}"
    places = [e.text for e in ElementTree.parse(site / "sitemap.xml").getroot().iter() if e.text]
    assert "https://sparsebench.example/x/h200/ffn-step/" in places
    assert f"manifest SHA-256 {bundle.identity(STEP)}." in page  # how to cite it
    (slug,) = (path.name for path in (site / "runs").iterdir())
    badge = ElementTree.parse(site / "badges" / f"{slug}.svg").getroot()
    assert int(badge.attrib["width"]) <= 376  # a phone shows it without making it smaller
    title, left, right = (text for text in badge.itertext() if text.strip())
    assert left == "H200 · ffn-step"
    assert right.startswith(f"{gain} [")
    assert f"NVIDIA H200 · ffn-step: {gain} ffn_step, " in title  # the conditions
    assert 'property="og:url" content="https://sparsebench.example/x/h200/ffn-step/"' in page
    assert re.search(r'property="og:description" content="NVIDIA H200, verdict: ' + gain, page)
    assert (site / "formats" / "active_csr.html").exists()
    assert (site / "kernels" / "ffn_step_sparse.html").exists()


def test_a_page_asks_for_the_gpus_without_rows(site: Path) -> None:
    page = (site / "welcome.html").read_text()
    measured, _, wanted = page.partition("<h2>GPUs without rows</h2>")
    assert '<td data-head="device">NVIDIA H200</td>' in measured
    assert "Ada: L40S, RTX 4090" in wanted
    assert "sparsebench contribute mine" in wanted
    assert 'href="welcome.html"' in (site / "index.html").read_text()


def test_a_run_that_is_added_leaves_the_others_as_they_are(site: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.glob("h200/*/*")}
    done = publish([copied(tmp_path / "other", commit="1" * 40)], site, Site(), unchecked)
    assert len(done.slugs) == 2
    assert len(done.written) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    again = publish([STEP], site, Site(), unchecked)
    assert again.written == []
    assert again.slugs == done.slugs
    shutil.rmtree(site / "h200" / "other")
    assert len(publish([STEP], site, Site(), unchecked).slugs) == 1


def test_a_run_that_is_added_makes_the_site_that_a_full_build_makes(tmp_path, monkeypatch) -> None:
    def build(run: object, file: Path, surrounding: Surrounding, **more: object) -> None:
        file.write_text(str(surrounding))

    def contents(to: Path) -> dict[str, bytes]:
        files = (path for path in to.rglob("*") if path.is_file())
        return {file.relative_to(to).as_posix(): file.read_bytes() for file in files}

    monkeypatch.setattr(run_folder, "build", build)
    gpu = json.loads((STEP / "environment.json").read_text())["gpu"]
    other = copied(tmp_path / "other", gpu={**gpu, "name": "another GPU", "uuid": "GPU-2"})
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    publish([STEP], grown, Site(), unchecked)
    before = contents(grown)
    publish([other], grown, Site(), unchecked)
    after = contents(grown)
    publish([STEP, other], whole, Site(), unchecked)
    assert after == contents(whole)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in after if b"another-gpu/other" in after[name]} <= changed
    assert {"index.html", "runs.html", "formats/dense.html", "compare/ffn-step.html"} <= changed
    assert not {name for name in changed if name.startswith("h200/")}


def test_a_suite_that_ran_on_several_devices_has_a_comparison(copy: Path, tmp_path: Path) -> None:
    assert not [*copy.glob("compare/*.json")]
    gpu = json.loads((STEP / "environment.json").read_text())["gpu"]
    other = copied(tmp_path / "other", gpu={**gpu, "name": "another GPU", "uuid": "GPU-2"})
    publish([other], copy, Site(), unchecked)
    page = copy / "compare" / "ffn-step.html"
    text = page.read_text()
    assert str(tmp_path) not in text
    assert 'href="../runs.html">Runs</a>' in text
    assert "is faster than" in text
    for place in ("h200/ffn-step", "another-gpu/other"):
        assert f'href="../{place}/index.html"' in text
    index = (copy / "compare" / "index.html").read_text()
    assert "../compare/ffn-step.html" in index
    assert (
        "Training: gradients and steps: compared with H200, another GPU takes as much time" in index
    )
    assert index.count('<section class="view"') == 2  # either GPU may come first
    written = page.stat().st_mtime_ns
    publish([STEP], copy, Site(), unchecked)
    assert page.stat().st_mtime_ns == written
    assert (copy / "compare" / "index.html").read_text() == index
    shutil.rmtree(copy / "another-gpu")
    publish([STEP], copy, Site(), unchecked)
    assert not page.exists()
    assert "ffn-step" not in (copy / "compare" / "index.html").read_text()


def test_a_device_is_compared_by_all_runs_of_a_suite_that_another_device_has_too(
    site: Path,
) -> None:
    card = next(iter(run_folder.run_folders(site).values())).card
    halves = [replace(card, gpu="A GPU", lines=card.lines[n::2]) for n in (0, 1)]
    apart = replace(card, gpu="A GPU", lines=[{**card.lines[0], "side": "ours", "m": 12345}])
    (devices,) = find_devices([card, *halves, apart])
    assert [*map(len, devices.sides)] == [2, 1]


def test_paths_users_and_hosts_are_left_out_and_listed(tmp_path: Path) -> None:
    path = "/home/lovelace/my models/gate.safetensors"
    run = copied(
        tmp_path / "run", tuned=path, hostname="node17", note="lovelace on node17: ~/x/y.py"
    )
    no_paths = "https://a.b/c/d", "GB/s at 1 / (1 - s)", "n/k and/or", "a/b"
    plain = copied(tmp_path / "plain", **{str(i): text for i, text in enumerate(no_paths)})
    (tmp_path / "same").mkdir()
    assert bundle.redact(plain, tmp_path / "same").texts == {}
    (run / "worker.log").write_text("lovelace")
    (tmp_path / "clean").mkdir()
    removed = bundle.redact(run, tmp_path / "clean")
    text = (tmp_path / "clean" / "environment.json").read_text()
    assert not any(word in text for word in ("lovelace", "node17", "/home", "hostname"))
    assert json.loads(text)["tuned"] == "gate.safetensors"
    assert removed.of == bundle.identity(run) != bundle.identity(tmp_path / "clean")
    assert removed.texts["a path: gate.safetensors"] == 1
    assert removed.texts["a field: hostname"] == 1
    assert removed.files == ["worker.log"]
    assert bundle.verify(tmp_path / "clean")
    assert [row.case.id for row in store.rows(tmp_path / "clean")] == [
        row.case.id for row in store.rows(run)
    ]


def test_names_are_text_on_every_page_and_safe_in_a_link(site: Path) -> None:
    (summary,) = list(site.glob("*/*/summary.json"))[:1]
    data = json.loads(summary.read_text())
    lines = [{**line, "kernel": NAMED, "name": NAMED, "kind": NAMED} for line in data["lines"]]
    texts = {
        "gpu": NAMED,
        "suite": NAMED,
        "name": NAMED,
        "only": NAMED,
        "sentences": [NAMED],
        "gain": NAMED,
    }
    files = dict(pages([Card(**{**data, **texts, "lines": lines})], Site(base="https://a.b/")))
    assert not any("<script>alert" in text for name, text in files.items() if "json" not in name
                   and "CITATION" not in name)  # fmt: skip
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                "0123456789_-./") for name in files)  # fmt: skip
    assert len(page_of("kernel", NAMED)) < 100
    assert bundle.link_name(NAMED, NAMED, 64 * "a").startswith("script-alert-1-script-quoted")
    assert len(bundle.link_name(NAMED, NAMED, 64 * "a")) <= 71
    ElementTree.fromstring(files["feed.xml"])


@pytest.fixture
def without_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a site have no claims, which take a second to plan."""
    monkeypatch.setattr("sparsebench.harness.claims.claim_plan.read_claims", lambda names: [])


@pytest.mark.usefixtures("without_claims")
def test_a_bad_call_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("mine")
    broken = copied(tmp_path / "broken")
    (broken / "suite.yaml").write_text("changed")
    to = tmp_path / "to"
    for options, message in (
        ([STEP, "--out", full], "expected a new or an empty folder, or a site; found thesis.tex"),
        ([STEP, STEP, "--out", to], "expected each run once, found it also as"),
        ([tmp_path / "none", "--out", to], "expected the directory of a run"),
        ([broken, "--out", to], "expected SHA-256"),
        ([STEP, "--out", to, "--base-url", "javascript:x"], "--base-url: expected an address"),
        ([STEP, "--out", full / "thesis.tex"], "expected a folder, found a file"),
        (["--out", to], "Missing argument"),
    ):
        assert message in refusal("publish", *options)
        assert not to.exists()
    with locked_folder(to):
        assert "no other process" in refusal("publish", STEP, "--out", to)
    assert not to.exists()
    with pytest.raises(ResultError, match="found none"):
        publish([], to, Site(), unchecked)
    (full / ".state.json").write_text('{"schema": "other@1"}')
    with pytest.raises(ResultError, match="found other@1"):
        publish([STEP], full, Site(), unchecked)
    (full / ".state.json").unlink()
    assert [file.name for file in full.iterdir()] == ["thesis.tex"]
