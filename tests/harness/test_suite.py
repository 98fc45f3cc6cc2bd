import os
import re
from pathlib import Path

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.catalog import suites
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Suite, read
from sparsebench.harness.run import try_kernel

HEAD = "schema: sparsebench/suite@1\ntitle: t\n"
PROBLEM = "{op: linear, m: 8, n: 64, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5}"
CONTENDER = "{format: csr, kernel: scipy_csr}"


def suite(
    tmp_path: Path, problem: str = PROBLEM, contender: str = CONTENDER, rest: str = ""
) -> Suite:
    path = tmp_path / "s.yaml"
    path.write_text(f"{HEAD}problems:\n  - {problem}\ncontenders:\n  - {contender}\n{rest}")
    return read(str(path), tmp_path)


@pytest.mark.parametrize("name", sorted(suites().keys() - {"dlmc", "trained"}))
def test_every_packaged_suite_can_be_read(name: str) -> None:
    result = read(name)
    assert result.contests
    ids = [contest.problem.id for contest in result.contests]
    assert len(set(ids)) == len(ids)
    dense = [contest.contenders[0].baseline for contest in result.contests]
    assert any(dense) if name.startswith("tokens") else all(dense)  # it compares numbers of tokens


def test_lists_are_sweeps_and_mappings_set_several_fields(tmp_path: Path) -> None:
    problem = (
        "{op: linear, size: [{n: 64, k: 32}, {n: 32, k: 64}], m: [1, 2], dtype: [fp32, bf16],"
        " pattern: blocks, block: [8, [4, 16]], sparsity: 0.5, seed: [0, 1]}"
    )
    result = suite(
        tmp_path, problem, "{format: bsr, kernel: scipy_bsr, params: {block: [$block, 4]}}"
    )
    assert len(result.contests) == 2 * 2 * 2 * 2 * 2
    first = result.contests[0]
    assert (first.problem["n"], first.problem["k"], first.problem["block"]) == (64, 32, 8)
    assert [c.params["block"] for c in first.contenders] == [8, 4]
    assert {str(c.problem["block"]) for c in result.contests} == {"8", "[4, 16]"}


def test_a_problem_of_two_sweeps_is_measured_once(tmp_path: Path) -> None:
    twice = "{op: linear, n: 64, k: 32, m: [1, 2], dtype: fp32, pattern: dense}\n  - {op: linear,"
    result = suite(tmp_path, f"{twice} n: 64, k: 32, m: [2, 4], dtype: fp32, pattern: dense}}")
    assert [contest.problem["m"] for contest in result.contests] == [1, 2, 4]


def test_a_contender_of_an_op_competes_at_its_problems_alone(tmp_path: Path) -> None:
    gradient = PROBLEM.replace("linear", "linear_dgrad")
    entry = "{op: linear_dgrad, format: csr, kernel: scipy_csr_dgrad}"
    result = suite(tmp_path, f"{PROBLEM}\n  - {gradient}", f"{CONTENDER}\n  - {entry}")
    kernels = [[c.kernel for c in contest.contenders] for contest in result.contests]
    assert kernels == [["scipy_csr"], ["scipy_csr", "scipy_csr_dgrad"]]


def test_a_weight_may_have_a_parameter_of_its_own(tmp_path: Path) -> None:
    problem = PROBLEM.replace("linear", "ffn")
    entry = "{format: bsr, kernel: reference, params: {block: 8, wd.block: [$block, 4]}}"
    (contest,) = suite(tmp_path, problem, entry).contests
    params = [c.params for c in contest.contenders]
    assert params == [{"block": 8, "wd.block": 8}, {"block": 8, "wd.block": 4}]
    result = [contest.contenders[1].params_of(weight) for weight in ("wg", "wu", "wd")]
    assert result == [{"block": 8}, {"block": 8}, {"block": 4}]


def test_a_spense_format_can_take_its_fraction_and_split_from_the_pattern(tmp_path: Path) -> None:
    sizes = "m: 8, n: 512, k: 512, dtype: bf16, sparsity: 0.375"
    linear = f"{{op: linear, pattern: spense_columns, {sizes}}}"
    both = "{dense_fraction: $dense_fraction, split: $split}"
    entry = f"{{format: spense, kernel: spense_wgmma, params: {both}}}"
    [contest] = suite(tmp_path, linear, entry).contests
    assert contest.contenders[0].params == {"dense_fraction": 0.25, "split": "columns"}
    mlp = f"{{op: ffn, pattern: spense_hidden, {sizes}}}"
    params = "{dense_fraction: $dense_fraction, split: rows, wd.split: columns}"
    [contest] = suite(tmp_path, mlp, entry.replace(both, params)).contests
    assert contest.contenders[0].params["dense_fraction"] == 0.25
    for problem in (mlp, PROBLEM):
        with pytest.raises(SuiteError, match=r"params.*: expected \$ and one of .*; found \$"):
            suite(tmp_path, problem, entry)


def test_a_contender_competes_only_where_its_entry_says(tmp_path: Path) -> None:
    problem = PROBLEM.replace("m: 8", "m: [8, 16, 32]")
    entry = "{at: {m: [8.0, 32.0], pattern: blocks}, format: csr, kernel: scipy_csr}"
    rest = "baselines: [{format: dense, kernel: torch_dense}]\n"
    contests = suite(tmp_path, problem, entry, rest).contests
    assert [len(contest.contenders) for contest in contests] == [2, 1, 2]
    both = PROBLEM.replace("fp32", "[fp32, bf16]")
    with pytest.raises(SuiteError, match=r"expected one at linear with .*dtype=bf16"):
        suite(tmp_path, both, "{format: csr, kernel: scipy_csr, at: {dtype: fp32}}")
    with pytest.raises(SuiteError, match=r"contenders\[0\].at.dtype: expected"):
        suite(tmp_path, PROBLEM, "{format: csr, kernel: scipy_csr, at: {dtype: fp8}}")


def test_a_contender_that_is_also_the_baseline_competes_once(tmp_path: Path) -> None:
    result = suite(tmp_path, rest=f"baselines:\n  - {CONTENDER}\n")
    (contest,) = result.contests
    assert [(c.kernel, c.baseline) for c in contest.contenders] == [("scipy_csr", True)]


USUAL: dict[str, dict[str, object]] = {
    "ffn": {"m": 1, "n": 64, "k": 32, "dtype": "fp32", "activation": "relu"},
    "decoder": {"m": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    | {"vocab": 8, "layers": 2, "context": 4, "caches": 1, "dtype": "bf16", "sparsity": 0.95}
    | {"pattern": "blocks"},
    "attention": {"m": 40, "context": 56, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    | {"block": [[8, 8]], "dtype": "fp32", "pattern": "top_k_blocks", "sparsity": 0.3},
}
OF_OPS: list[tuple[str, dict[str, object], str]] = [
    ("ffn", {"active": 8, "activation": "silu"}, "not silu"),
    ("ffn", {"active": 64}, "active below n, 64, not 64"),
    ("ffn", {"skew": "zipf"}, "active with a skew, not none"),
    ("ffn", {"active": 8, "pattern": "banded", "block": 8, "sparsity": 0.5}, "not banded"),
    ("ffn", {"active": 8, "pattern": "blocks", "block": [4, 16], "sparsity": 0.6}, "not 0.8"),
    ("decoder", {"heads": 5}, "heads a multiple of kv_heads, 2, not 5"),
    ("decoder", {"head_dim": 7}, "an even head_dim, not 7"),
    ("decoder", {"caches": 3}, "caches up to layers, 2, not 3"),
    ("decoder", {"dtype": "fp8"}, "sparsity up to 0.9 in fp8, not 0.95"),
    ("decoder", {"dtype": "tf32"}, "found 'tf32'"),
    ("decoder", {"active": 4}, "relu or relu2, 16 or 32 bits and the pattern dense"),
    ("attention", {"kv_heads": 3}, "kv_heads"),
    ("attention", {"video": [[2, 4, 4]]}, "video"),
    ("attention", {"causal": "true", "pattern": "banded"}, "causal"),
    ("attention", {"lists": "head"}, "lists"),
    ("attention", {"sparsity": 0.99}, "nearest level"),
]
ALLOWANCES = {  # of an error
    "0.01": "contenders.0.error: expected",
    "{at_most: 0.01}": "contenders.0.error.why: expected a value, found none",
    "{at_most: 0.0, why: x}": "contenders.0.error.at_most: expected greater than 0",
    "{at_most: 0.01, why: ''}": "contenders.0.error.why: ",
}
MASKED = "{format: block_mask, kernel: sdpa_masked, params: {block: 16}}"


def written(op: str, **fields: object) -> str:
    """Return a problem in YAML: the usual fields of its op, with changes."""
    values = {"op": op, **USUAL[op], **fields}
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


BAD = {
    **{
        f"{op} {fields}": (written(op, **fields), "{format: dense, kernel: torch_dense}", "", token)
        for op, fields, token in OF_OPS
    },
    **{
        error: (PROBLEM, f"{{format: dense, kernel: torch_dense, error: {error}}}", "", token)
        for error, token in ALLOWANCES.items()
    },
    "param of a mask": (written("attention"), MASKED, "", "block: unknown key"),
    "unknown key": (PROBLEM.replace("m: 8", "m: 8, sparsty: 0.5"), CONTENDER, "",
                    "problems[0]: sparsty: unknown key (did you mean sparsity?)"),
    "wrong type": (PROBLEM.replace("m: 8", "m: eight"), CONTENDER, "",
                   "problems[0]: m: expected a valid integer; found 'eight'"),
    "negative block": (PROBLEM.replace("block: 8", "block: -8"), CONTENDER, "",
                       "problems[0]: block: expected greater than 0; found -8"),
    "missing field": (PROBLEM.replace("m: 8, ", ""), CONTENDER, "",
                      "problems[0]: m: expected a value, found none"),
    "set twice": (PROBLEM.replace("m: 8", "m: 8, s: [{m: 4}]"), CONTENDER, "",
                  "expected m to be set once"),
    "unknown op": (PROBLEM.replace("op: linear", "op: lineer"), CONTENDER, "",
                   "found 'lineer' (did you mean linear?)"),
    "no op": (PROBLEM.replace("op: linear, ", ""), CONTENDER, "", "problems[0].op: expected"),
    "unknown dtype": (PROBLEM.replace("fp32", "fp33"), CONTENDER, "",
                      "'bf16', 'fp32', 'tf32', 'fp8' or 'int8'; found 'fp33'"),
    "tf32 of products in a row": (
        PROBLEM.replace("op: linear", "op: ffn").replace("fp32", "tf32"), CONTENDER, "",
        "dtype: expected 'fp16', 'bf16', 'fp32' or 'fp8'; found 'tf32'"),
    "unknown pattern": (PROBLEM.replace("pattern: blocks", "pattern: block"), CONTENDER, "",
                        "found 'block' (did you mean blocks?)"),
    "impossible level": (PROBLEM.replace("n: 64, k: 64", "n: 16, k: 16").replace("0.5", "0.9"),
                         CONTENDER, "", "2x2 grid of 8x8 blocks"),
    "unknown kernel": (PROBLEM, "{format: csr, kernel: scipy_crs}", "",
                       "found 'scipy_crs' (did you mean scipy_csr?)"),
    "op of no problem": (PROBLEM, "{op: linear_dgard, format: csr, kernel: scipy_csr}", "",
                         "contenders[0].op: expected an op of the problems: linear; found"),
    "unknown format": (PROBLEM, "{format: bsrr, kernel: reference}", "", "(did you mean bsr?)"),
    "another format's kernel": (PROBLEM, "{format: bsr, kernel: scipy_csr}", "",
                                "expected format csr for kernel scipy_csr, found bsr"),
    "unknown param": (PROBLEM, "{format: bsr, kernel: scipy_bsr, params: {blok: 8}}", "",
                      "contenders[0].params.blok: unknown key; takes block (did you mean block?)"),
    "unknown option": (PROBLEM, "{format: bsr, kernel: scipy_bsr, options: {fast: true}}", "",
                       "contenders[0].options.fast: unknown key; takes nothing"),
    "unknown binding": (PROBLEM, "{format: bsr, kernel: scipy_bsr, params: {block: $blok}}", "",
                        "expected $ and one of"),
    "unknown top key": (PROBLEM, CONTENDER, "baseline: []\n",
                        "baseline: unknown key (did you mean baselines?)"),
    "a key twice": (PROBLEM.replace("m: 8", "m: 8, m: 9"), CONTENDER, "", "found 'm' twice"),
    "not YAML": (PROBLEM + "}", CONTENDER, "", "expected YAML, found an error in line "),
    "source without a file": (PROBLEM.replace("m: 8", "m: 8, source: {file: '*.smtx'}"), CONTENDER,
                              "", "problems[0].source: expected files *.smtx in"),
    "source with another key": (PROBLEM.replace("m: 8", "m: 8, source: {path: x}"), CONTENDER, "",
                                "expected {file: GLOB, tensor: GLOB}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_the_place(name: str, tmp_path: Path) -> None:
    problem, contender, rest, expected = BAD[name]
    with pytest.raises(SuiteError) as error:
        suite(tmp_path, problem, contender, rest)
    message = str(error.value)
    assert expected in message
    assert "s.yaml: " in message
    assert "\n" not in message


def test_a_missing_suite_is_reported() -> None:
    with pytest.raises(SuiteError, match=r"found 'quik' \(did you mean quick\?\)"):
        read("quik")
    with pytest.raises(SuiteError, match=r"nothing\.yaml: expected a readable file"):
        read("nothing.yaml")
    with pytest.raises(SuiteError, match="expected --data DIR"):
        read("dlmc")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema, title, problems, contenders; found an empty file"),
        ("[1]", "found list"),
        ("schema: sparsebench/suite@1\ntitel: a", r"titel: unknown key \(did you mean title\?\)"),
    ],
)
def test_a_file_that_is_no_suite_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(SuiteError, match=message):
        read(str(tmp_path / "s.yaml"))


def test_files_become_problems_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("x", "y"):  # a copy is the same problem
        (tmp_path / "a" / f"{name}.smtx").write_text("2, 4, 3\n0 2 3\n0 3 1\n")
    result = suite(
        tmp_path, "{op: linear, source: {file: '**/*.smtx'}, m: 1, dtype: fp32, pattern: file}"
    )
    (contest,) = result.contests
    assert contest.problem.source is not None
    assert contest.problem.source.path == "a/x.smtx"
    assert (contest.problem["n"], contest.problem["k"]) == (2, 4)
    assert contest.problem["sparsity"] == pytest.approx(5 / 8)


def test_only_can_leave_out_and_baselines_stay() -> None:
    whole = read("decode").contests
    selection = only(whole, "kernel!=cusparse_bell|torch_bsr m!=16")
    kernels = {k.kernel for contest in whole for k in contest.contenders}
    selected = {k.kernel for c in selection for k in c.contenders}
    assert selected == kernels - {"cusparse_bell", "torch_bsr"}
    assert {contest.problem["m"] for contest in selection} == {c.problem["m"] for c in whole} - {16}
    assert all(contest.contenders[0].baseline for contest in selection)
    with pytest.raises(
        SuiteError, match=r"kernel!=cusparse_b, found none \(did you mean cusparse_b\w+\?\)"
    ):
        only(whole, "kernel!=cusparse_b")


def test_only_keeps_a_cell_and_its_baselines(tmp_path: Path) -> None:
    rest = "baselines:\n  - {format: dense, kernel: torch_dense}\n"
    result = suite(tmp_path, PROBLEM.replace("m: 8", "m: [8, 16]"), rest=rest)
    (contest,) = only(result.contests, "m=16 kernel=scipy_csr")
    assert contest.problem["m"] == 16
    assert [c.kernel for c in contest.contenders] == ["torch_dense", "scipy_csr"]
    assert len(only(result.contests, "sparsity=0.50")) == 2
    assert [c.problem["m"] for c in only(result.contests, "m=8|16 m=16")] == [16]
    with pytest.raises(SuiteError, match="'m=8 m=16': expected at least one case, found none"):
        only(result.contests, "m=8 m=16")
    with pytest.raises(SuiteError, match="expected at least one case of m=17, found none"):
        only(result.contests, "m=16|17")
    with pytest.raises(SuiteError, match="expected field=value with a field of"):
        only(result.contests, "tokens=16")


def test_a_file_whose_name_is_no_text_is_refused_before_anything_is_measured(tmp_path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.smtx")).write_text("4, 8, 5\n0 1 2 4 5\n0 3 1 7 2\n")
    problem = "{op: linear, m: 8, dtype: fp32, pattern: file, source: {file: '*.smtx'}}"
    with pytest.raises(SuiteError, match=r"expected names in UTF-8, found .*a.udcff.smtx"):
        suite(tmp_path, problem)


def test_a_merge_key_takes_the_fields_of_another_problem(tmp_path: Path) -> None:
    merged = f"&p {PROBLEM}\n  - &q {{<<: *p, m: 16}}\n  - {{<<: [*q, *p], n: 128}}"
    result = [contest.problem for contest in suite(tmp_path, merged).contests]
    sizes = [(p["m"], p["n"], p["k"], p["block"]) for p in result]
    assert sizes == [(8, 64, 64, 8), (16, 64, 64, 8), (16, 128, 64, 8)]


@pytest.mark.parametrize("twice", ["{<<: *p, <<: *p}", "{<<: *p, m: 1, m: 2}"])
def test_a_mapping_with_a_merge_key_still_has_each_key_once(twice: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="each key once"):
        suite(tmp_path, f"&p {PROBLEM}\n  - {twice}")


EMPTY = {
    "problems[0].n": (PROBLEM.replace("n: 64", "n: []"), CONTENDER),
    "problems[0].seed": (PROBLEM.replace("n: 64", "n: 64, seed: []"), CONTENDER),
    "problems[0].shape": (PROBLEM.replace("n: 64", "shape: {}"), CONTENDER),
    "problems[0].field": (PROBLEM.replace("n: 64", "field: [{}]"), CONTENDER),
    "contenders[0].params.block": (
        PROBLEM,
        "{format: bsr, kernel: torch_bsr, params: {block: []}}",
    ),
    "contenders[0].at.m": (PROBLEM, "{format: csr, kernel: scipy_csr, at: {m: []}}"),
}


@pytest.mark.parametrize("place", EMPTY)
def test_a_list_without_a_value_drops_no_work_silently(place: str, tmp_path: Path) -> None:
    problem, contender = EMPTY[place]
    with pytest.raises(SuiteError) as raised:
        suite(tmp_path, f"{PROBLEM}\n  - {problem}", f"{CONTENDER}\n  - {contender}")
    place = place.replace("[0]", "[1]")
    assert f"s.yaml: {place}: expected " in str(raised.value)


@pytest.mark.parametrize("number", ["0100", "-010", "00", "1:04", "1:04.5", "+0_1"])
def test_a_number_in_another_base_is_refused(number: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=f"decimal number, found {re.escape(number)}"):
        suite(tmp_path, PROBLEM.replace("m: 8", f"m: {number}"))
    with pytest.raises(SuiteError, match=f"decimal number, found {re.escape(number)}"):
        try_kernel.plan("scipy_csr", [f"m={number}", "n=64", "k=64"], torch.device("cpu"))
    for plain, value in (("0x40", 64), ("1_0", 10), ("64", 64)):
        (contest,) = suite(tmp_path, PROBLEM.replace("m: 8", f"m: {plain}")).contests
        assert contest.problem["m"] == value
