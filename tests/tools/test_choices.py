import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sparsebench.results import store
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from tests.tools import choices

RUN = SimpleNamespace(environment={"gpu": {"compute_capability": "9.0", "multiprocessors": 132}})


def choice(m: int, tokens: int, **more: Any) -> dict[str, Any]:
    problem = {"op": "bsr.linear", "m": m}
    return {"kernel": "bsr_small", "tokens": tokens, "by": "search", "problem": problem, **more}


def test_a_list_has_the_choice_of_most_processes(tmp_path, monkeypatch) -> None:
    users = Contender("bsr", "default", {}, {}, False)
    row = Row(Case(Problem("linear", {"m": 1}), users), Status.OK)
    entries = [choice(1, 16), choice(1, 32, code="digest"), choice(1, 32, code="digest")]
    layer = {"wg": choice(8, 8), "wd": choice(16, 16, by="model")}
    named = replace(row.case, contender=replace(users, kernel="bsr_small"))
    rows = [
        *(replace(row, choice=each) for each in (*entries, layer)),
        replace(row, case=named, choice=choice(64, 64)),
        replace(row, status=Status.WRONG, choice=choice(128, 64)),
    ]
    monkeypatch.setattr(store, "read", lambda run: RUN)
    monkeypatch.setattr(store, "rows", lambda run: rows)
    kept = {"problem": {"op": "bsr.linear", "m": 4}, "kernel": "bsr_small", "config": {"tokens": 4}}
    file = tmp_path / "sm90_132.choices"
    file.write_text(json.dumps(kept) + "\n")
    assert choices.write(tmp_path, tmp_path) == (file, 2)
    lines = {line["problem"]["m"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {m: line["config"]["tokens"] for m, line in lines.items()} == {1: 32, 4: 4, 8: 8}
    assert lines[1]["code"] == "digest"
