"""`sparsebench try`: one kernel on one problem, checked and timed beside its baseline."""

import re
from io import StringIO

import pytest
from rich.console import Console

from sparsebench.errors import Unsupported
from sparsebench.harness.bench import device_ceilings
from sparsebench.harness.doctor import findings, other_work
from sparsebench.harness.run.try_kernel import plan, repeat, report, try_kernel
from tests.tools.command_line import refusal, sparsebench
from tests.tools.devices import CPU

SMALL = "m=8", "n=64", "k=64", "--device", "cpu"


def test_a_kernel_is_checked_and_timed_beside_its_baseline(monkeypatch) -> None:
    busy = findings.warning("other work", "1.0 of 2 cores", "Times scatter.", "")
    monkeypatch.setattr(other_work, "host", lambda *spent: busy)
    done = sparsebench("try", "scipy_bsr", "block=16", "sparsity=0.75", *SMALL)
    assert done.returncode == 0, done.stderr
    ours, dense = (line for line in done.stdout.splitlines() if re.match(r"(bsr|dense)/", line))
    assert ours.startswith("bsr/scipy_bsr")
    assert dense.startswith("dense/torch_dense")
    assert "baseline" in dense
    for text in ("pattern=blocks", "weights: 4", "convert", "one process"):
        assert text in done.stdout
    assert "hardware limit" not in done.stdout  # a CPU's cores are shared
    assert "1.0 of 2 cores" in done.stderr


def test_words_become_fields_options_and_parameters() -> None:
    words = ["m=8", "n=64", "k=64", "block=16x32", "sparsity=0.5", "seed=3", "baseline=reference"]
    result = plan("torch_bsr", [*words, "tuned=true"], CPU)
    baseline, ours = result.contenders
    assert (result.problem["block"], result.problem.seed) == ([16, 32], 3)
    assert (ours.params, ours.options) == ({"block": [16, 32]}, {"tuned": True})
    assert (baseline.kernel, baseline.baseline) == ("reference", True)


def test_a_format_takes_values_of_the_pattern_by_default() -> None:
    words = ["m=8", "n=512", "k=512", "dtype=bf16", "pattern=spense_rows", "sparsity=0.25"]
    (_, ours) = plan("spense_wgmma", words, CPU).contenders
    assert ours.params == {"dense_fraction": 0.5, "split": "rows"}
    (_, ours) = plan("spense_wgmma", [*words, "dense_fraction=0.75"], CPU).contenders
    assert ours.params["dense_fraction"] == 0.75


def test_the_pattern_follows_from_the_words() -> None:
    sizes = ["m=8", "n=64", "k=64"]
    for more, pattern in (
        (["sparsity=0.5", "block=16"], "blocks"),
        (["sparsity=0.5"], "unstructured"),
        ([], "dense"),
    ):
        assert plan("torch_dense", [*sizes, *more], CPU).problem["pattern"] == pattern


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scipy_bs"], "found 'scipy_bs' (did you mean scipy_bsr?)"),
        (["numpy"], "expected a known kernel or module:KERNEL, found 'numpy' (see"),
        (["scipy_bsr", "sparsty=0.9"], "found 'sparsty' (did you mean sparsity?)"),
        (["scipy_bsr", "m"], "expected field=value, found 'm'"),
        (["scipy_bsr", "m=1", "m=2"], "expected m once, found it twice"),
        (["scipy_bsr", "m=8", "n=64"], "k: expected a value, found none"),
        (["scipy_bsr", "m=["], "try: m: expected YAML"),
        (["scipy_bsr", "op=5"], "found '5'"),
        (["scipy_bsr", "seed=one", "m=8"], "seed: expected an integer, found 'one'"),
        (
            ["spense_wgmma", "m=8", "n=512", "k=512", "pattern=spense_rows", "sparsity=x"],
            "sparsity",
        ),
        (["scipy_bsr", "op=liner", "m=8"], "found 'liner' (did you mean linear?)"),
        (["bsr_wgmma", "m=8", "n=64", "k=64"], "bsr_wgmma: runs on cuda, not on cpu"),
        (["scipy_bsr", "op=ffn", "m=8", "n=64", "k=64"], "scipy_bsr: computes linear, not ffn"),
    ],
)
def test_impossible_trials_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    assert message in refusal("try", *arguments, "--device", "cpu")


def test_an_unsupported_case_is_reported_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_ceilings, "measure", lambda device: pytest.fail("ceilings were measured")
    )
    line = refusal("try", "bsr_wgmma", "block=16", "sparsity=0.5", *SMALL)
    assert "bsr_wgmma: runs on cuda, not on cpu" in line


def test_a_wrong_kernel_has_no_time_and_ends_with_3() -> None:
    done = sparsebench("try", "wrong:zeros", "format=dense", *SMALL)
    assert done.returncode == 3
    assert re.search(r"wrong:zeros: wrong: before timing", done.stdout)


def test_a_reason_is_whole_in_a_narrow_terminal() -> None:
    result = try_kernel("wrong:zeros", ["format=dense", *SMALL[:-2]], CPU)
    written = StringIO()
    Console(width=40, file=written).print(report(result))
    details = [row.detail for row in result.rows if row.detail]
    assert details
    assert all("".join(text.split()) in "".join(written.getvalue().split()) for text in details)


def test_a_profiler_sees_the_kernel_alone() -> None:
    words = ["m=8", "n=64", "k=64"]
    repeat("torch_dense", words, CPU, times=2)
    with pytest.raises(Unsupported, match="runs on cuda"):
        repeat("cublas", words, CPU, times=2)
