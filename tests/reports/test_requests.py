"""The section of servers: requests per second, and whether the host decides."""

import re
from typing import Any

from sparsebench.harness.catalog import load_op
from sparsebench.reports.figures import requests
from sparsebench.reports.findings import headline
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.analysis import Analysis, analyse
from tests.results.made_up import stored

DENSE = Contender("dense", "serving_transformers", baseline=True)
SPARSE = Contender("spense", "serving_transformers")
FIELDS: dict[str, Any] = {
    "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 256, "vocab": 512,
    "layers": 1, "of_layers": 2, "dtype": "bf16", "pattern": "two_four_blocks", "block": 16,
    "sparsity": 0.875,
}  # fmt: skip
READINGS = {"first_token": 30.0, "per_token": 5.0, "cold": 400.0}  # ms of a dense server


def measured_run(calls: dict[int, tuple[float, float]], **choice: str) -> Analysis:
    """Return a run of servers: by requests at once, ms of a dense call and of its steps.

    The sparse server takes 0.8 of all times.
    """
    op = load_op("serving")
    measured = []
    for concurrency, (call_ms, steps_ms) in calls.items():
        fields = {**op.defaults, **FIELDS, "concurrency": concurrency, "requests": 2 * concurrency}
        problem = Problem("serving", fields, defaults=op.defaults)
        measured += [
            Row(
                Case(problem, contender),
                Status.OK,
                process,
                scope=scope,
                clock="events",
                samples_us=(1e3 * ms * part * (1 + process / 1000),),
                choice=choice,
            )
            for process in range(8)
            for contender, part in ((DENSE, 1.0), (SPARSE, 0.8))
            for scope, ms in (("op", call_ms), ("steps", steps_ms), *READINGS.items())
        ]
    return analyse(stored(measured))


def drawn(calls: dict[int, tuple[float, float]]) -> str:
    return str(requests.draw(measured_run(calls)))


def test_a_server_has_its_requests_per_second_and_its_gain() -> None:
    page = drawn({8: (200.0, 180.0)})
    assert "80" in page  # 16 requests in 200 ms
    assert "100" in page
    assert "1.2" in page
    assert "90 %" in page
    assert page.count("<tr>") == 1 + 2


def test_the_headline_has_the_requests_per_second_of_both_servers_with_intervals() -> None:
    rest = headline(measured_run({8: (200.0, 180.0)}))["rest"].split("; ")
    (rates,) = (text for text in rest if "requests per second" in text)
    sparse, dense = re.findall(r"[\d.]+ \[[\d.]+, [\d.]+\]", rates)
    assert sparse.startswith("99.7 [")  # 16 requests in 0.8 of 200 ms
    assert dense.startswith("79.7 [")


def test_the_headline_of_servers_names_their_attention() -> None:
    rest = headline(measured_run({8: (200.0, 180.0)}, attention="sdpa"))["rest"]
    assert re.search(r"requests per second: [^;]*\], both with sdpa; ", rest)


def test_every_number_of_a_server_has_an_interval() -> None:
    page = drawn({8: (200.0, 180.0)})
    _, _, sparse = (re.findall(r"<td.*?>(.*?)</td>", line) for line in page.split("<tr>")[1:])
    starts = {2: "99.7 [", 5: "90.0 % [", 6: "24.08 [", 7: "4.01 [", 8: "321 [", 9: "1.2"}
    for place, start in starts.items():
        assert sparse[place].startswith(start), sparse


def test_the_page_says_where_the_host_decides() -> None:
    page = drawn({1: (100.0, 20.0), 32: (100.0, 90.0)})
    assert "With 1 request at once the host decides" in page
    assert "The host does not decide" in drawn({32: (100.0, 90.0)})


def test_another_run_has_no_such_section() -> None:
    run = stored([])
    assert requests.draw(analyse(run)) == ""
