"""sparsebench.testing: our own kernels and figures by it, and what it finds in other people's."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import declare
import pytest
import wrong
import wrong_wgrad

from sparsebench import testing
from sparsebench.harness.catalog import load_kernel, names
from sparsebench.testing import Check
from tests.tools.marks import exhaustive

ON_CPU = [name for name in names("kernels") if load_kernel(name).device in ("cpu", "any")]
FIGURES = [c for name in names("reports.figures") for c in testing.figure_checks(name)]


@pytest.mark.parametrize("name", [exhaustive(n) if n == "torch_compile" else n for n in ON_CPU])
def test_every_kernel_of_a_cpu_keeps_its_contract(name: str) -> None:
    testing.check_kernel(name)


@pytest.mark.parametrize("check", FIGURES, ids=str)
def test_every_figure_keeps_its_contract(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", [declare.names(of)[0] for of in (wrong, wrong_wgrad)])
def test_a_wrong_kernel_is_found_like_in_a_contest(name: str) -> None:
    with pytest.raises(AssertionError, match="found wrong"):
        testing.check_kernel(name, "m=32 n=64 k=96 pattern=blocks block=16")


FORMAT = """
from dataclasses import dataclass, field
import torch
from sparsebench.formats.dense import Dense
from sparsebench.formats._format import require, require_matrix

@dataclass(frozen=True)
class Other(Dense):
    @classmethod
    def from_dense(cls, dense, /):
        {from_dense}

    def to_dense(self):
        return {to_dense}

NAME = Other
"""
OP = """
from dataclasses import replace
import torch
from sparsebench.harness.ops import linear
from sparsebench.harness.ops._op import Operand
NAME = replace(linear.OP, {changed})
"""
PATTERN = """
import torch
from sparsebench.harness.patterns._pattern import Pattern, Rule
NAME = Pattern({rule})
"""
FIGURE = """
class NAME:
    TITLE, ORDER, draw = 'Text', 0, lambda frames: '<b>'
"""
STORES = "return super().from_dense(dense)"
RANDOM = "lambda w: Rule(w.elements, 4, score=lambda g, *_: torch.randint(9, (g.cells,)))"


def _formats() -> Iterator[tuple[str, str | None]]:
    for from_dense, to_dense, reason in (
        (STORES, "self.values.clone()", None),
        (STORES, "self.values.half()", "expected torch.bfloat16 back, found torch.float16"),
        (STORES, "self.values.T", "expected its shape back"),
        (STORES, "self.values.nan_to_num()", r"expected nan to be kept, its bits \d+, found 0"),
        (STORES, "self.values.abs()", "expected the same bits back"),
        ("return cls(dense.shape, dense)", "self.values", ": expected FormatError, found"),
        ("require(False, 'never')", "None", "expected it to hold a matrix .* found FormatError"),
    ):
        yield FORMAT.format(from_dense=from_dense, to_dense=to_dense), reason


OPS = {
    "definition=lambda x, w: linear.definition(w, x)": r"expected arguments \['w', 'x'\]",
    "definition=lambda w, x: linear.definition(w, x).float()": "an output of torch.float16",
    "spread=lambda w, x: linear.spread(w, x)[:1]": r"expected a spread \[3, 6\], found",
    "both=lambda w, x: (linear.spread(w, x), linear.spread(w, x))": "expected `both` to give",
    "spread=lambda w, x: 0 * linear.spread(w, x)": "expected a spread above 0",
    "spread=lambda w, x: 1e-6 * linear.spread(w, x)": "expected errors above 0 and below",
    "flops=lambda problem, nnz: 1.0": "expected operations from 0 to more, found 1.0 to 1.0",
    "fewest_bytes=lambda problem, nnz, size: size * nnz['w'] // 2": "bytes more for all non",
    "operands={'w': Operand('weight', ('q', 'k'))}": r"expected sizes to be fields, found",
}
RULES = {
    "lambda w: Rule(w.elements, group=4, counts=(1,))": None,
    "lambda w: Rule(w.elements, group=w.k, counts=(0,))": "expected a level that it has",
    RANDOM: "expected one mask, found two",
    "lambda w: Rule(w.elements, 4), derived=lambda fields: [1]": "expected values by name",
}
BROKEN: list[tuple[Callable[[str], None], str, str | None]] = [
    *((testing.check_format, code, reason) for code, reason in _formats()),
    *((testing.check_op, OP.format(changed=code), reason) for code, reason in OPS.items()),
    *((testing.check_pattern, PATTERN.format(rule=rule), why) for rule, why in RULES.items()),
    (testing.check_figure, FIGURE, "expected Markup, found str"),
]


@pytest.mark.parametrize(("check", "code", "reason"), BROKEN)
def test_what_breaks_its_contract_is_found(tmp_path, monkeypatch, check, code, reason) -> None:
    (tmp_path / "other_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_module", raising=False)
    with pytest.raises(AssertionError, match=reason) if reason else nullcontext():
        check("other_module:NAME")


def test_a_kernel_that_runs_nothing_is_found_with_its_reasons() -> None:
    with pytest.raises(
        AssertionError, match=r"expected a problem that it runs, found none: .*cuda"
    ):
        testing.check_kernel("bsr_wgmma")


@pytest.mark.exhaustive
def test_the_checks_need_no_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = None\n"
        "from sparsebench import testing\n"
        "testing.check_op('linear')\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
