"""Detect contenders that change operands, or replace code of the harness.

    ArrayGuard  dense weights and activations, recordings, right answers, and every array of a
                format that several contenders share. If one has changed, the contest begins again
                without the contender (stages.py)
    Seal        every function and class of sparsebench that is loaded when a contest starts, with
                its code; the clocks, and what the check calls of torch; the settings of the process
                (process_state.py). What was replaced or changed is put back. If the machine code of
                a clock has changed, the process ends

Both are checked after each conversion, after each prepare with its first run, after each output
check and while timing. A contender that changed something is wrong; the others are not affected. A
kernel's own Python runs in this process, so it could undo a change before it returns, or write to
memory (harness/TRUST.md).

A checksum reads an array twice, in 8-byte words w laid out in rows of COLUMNS:

    sum over rows r of  a_r sum_c w_rc   +   sum over columns c of  b_c sum_r w_rc      modulo 2^64

a and b are odd random numbers, drawn anew in each process: no kernel can know them in advance.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.bench.process_state import ProcessState, SealedClocks

COLUMNS = 4096
WORD = 8  # bytes
CLOCKS: dict[Any, list[str]] = {
    time: ["perf_counter", "perf_counter_ns", "monotonic"],
    torch.cuda: ["Event", "synchronize"],
    torch.cuda.Event: ["record", "query", "elapsed_time"],
}
OF_TENSORS = ["double", "abs", "norm", "isfinite", "all", "any", "max", "sum", "copy_", "fill_"]
OF_TENSORS += ["__sub__", "__truediv__", "__mul__", "equal", "data_ptr", "view", "detach"]
OF_TORCH = [(o, n) for o, ns in {**CLOCKS, torch.Tensor: OF_TENSORS}.items() for n in ns]
CODE = "__code__", "__defaults__", "__kwdefaults__"
Code = tuple[Any, Any, Any]


class TamperingError(Exception):
    """A contender changed, or returned, memory or code that is not its own."""


class ClockError(TamperingError):
    """A contender changed the machine code of a clock, so no time of this process can be right."""


class SpoiledError(TamperingError):
    """A contender changed an array that the harness cannot put back."""


@dataclass(frozen=True, eq=False)
class WatchedArray:
    """An array by name: where its bytes are, and their checksum."""

    name: str
    array: Callable[[], Tensor | None]  # None once it has been released
    place: tuple[int, int]  # address and bytes
    total: int


@dataclass
class ArrayGuard:
    """The arrays that must not change in a contest."""

    watched: list[WatchedArray] = field(default_factory=list)
    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(7), "little"))

    def watch(self, arrays: Mapping[str, Tensor], *, held: bool = True) -> None:
        """Watch arrays; unless `held`, they may be released."""
        self.watched = [w for w in self.watched if w.array() is not None]
        places = {watched.place for watched in self.watched}
        new = {n: a for n, a in arrays.items() if a.numel() and _place(a) not in places}
        for (name, array), total in zip(new.items(), self._sums(new.values()), strict=True):
            alias = array.detach() if held else None  # unaffected by what happens to the other one
            find = (lambda alias=alias: alias) if held else weakref.ref(array)
            self.watched.append(WatchedArray(name, find, _place(array), total))

    def renew(self, names: set[str]) -> None:
        """Record the present content of these arrays, which the harness has written."""
        new = [w for w in self.watched if w.name in names]
        totals = self._totals(new)
        renewed = {w.name: replace(w, total=t) for w, t in zip(new, totals, strict=True)}
        self.watched = [renewed.get(w.name, w) for w in self.watched]

    def forget(self, names: set[str]) -> None:
        self.watched = [w for w in self.watched if w.name not in names]

    def check(self) -> None:
        """Raise SpoiledError if an array has moved, or if its content has changed."""
        self.watched = [w for w in self.watched if w.array() is not None]
        there = [w for w in self.watched if _in_place(w.array(), w.place)]
        totals = self._totals(there)
        right = [w for w, total in zip(there, totals, strict=True) if total == w.total]
        if changed := {w.name for w in self.watched if w not in right}:
            raise SpoiledError(f"changed {', '.join(sorted(changed))}")

    def refuse(self, out: Tensor) -> None:
        start, size = _place(out)
        for watched in self.watched:
            first, length = watched.place
            if watched.array() is not None and start < first + length and first < start + size:
                raise TamperingError(f"returned memory of {watched.name}")

    def _totals(self, watched: Iterable[WatchedArray]) -> list[int]:
        return self._sums(array for w in watched if (array := w.array()) is not None)

    def _sums(self, arrays: Iterable[Tensor]) -> list[int]:
        sums = [checksum(array, self.seed) for array in arrays]
        return torch.stack(sums).tolist() if sums else []


def checksum(array: Tensor, seed: int) -> Tensor:
    """Return an int64 of an array's bits and their places, on its device."""
    words = _words(array)
    rows = -(-len(words) // COLUMNS)
    of_rows, of_columns = _odd(seed, rows, array.device), _odd(~seed, COLUMNS, array.device)
    full = len(words) // COLUMNS
    table, rest = words[: full * COLUMNS].view(full, COLUMNS), words[full * COLUMNS :]
    total = (table.sum(1) * of_rows[:full]).sum() + (table.sum(0) * of_columns).sum()
    return total + (rest * of_columns[: len(rest)]).sum() * (2 * full + 1)


@lru_cache(64)  # each contest has a seed: an unbounded cache grew by 33 KB a contest and more
def _odd(seed: int, count: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=draw).mul_(2).add_(1).to(device)


def _words(array: Tensor) -> Tensor:
    flat = array.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % WORD or flat.data_ptr() % WORD:
        padded = flat.new_zeros(-(-len(flat) // WORD) * WORD)
        padded[: len(flat)] = flat
        flat = padded
    return flat.view(torch.int64)


def _place(array: Tensor) -> tuple[int, int]:
    return array.data_ptr(), array.numel() * array.element_size()


def _in_place(array: Tensor | None, place: tuple[int, int]) -> bool:
    """Return whether an array is where it was, and its storage is still large enough for it."""
    if array is None or _place(array) != place:
        return False
    start = array.storage_offset() * array.element_size()
    return start + place[1] <= array.untyped_storage().nbytes()


def arrays_of(weights: Mapping[str, Format], of: str) -> dict[str, Tensor]:
    """Name every array of a conversion."""
    return {
        f"{name}'s {array} in {of}": tensor
        for name, weight in weights.items()
        for array, tensor in weight.arrays().items()
    }


class Seal:
    """Records the definitions of the harness, and the settings of the process."""

    def __init__(self) -> None:
        self._torch = [(owner, name, _get(owner, name)) for owner, name in OF_TORCH]
        self._namespaces, self._functions = _definitions()
        self._process, self._clocks = ProcessState(), SealedClocks()

    def check(self) -> None:
        """Raise TamperingError if a name or a setting differs, after restoring all of them."""
        if clocks := self._clocks.changes():
            raise ClockError(f"rewrote the machine code of {', '.join(clocks[:3])}")
        changed = [entry for entry in self._torch if _get(*entry[:2]) is not entry[2]]
        for owner, sealed in self._namespaces:
            present = vars(owner)
            changed += [(owner, n, v) for n, v in sealed.items() if present.get(n) is not v]
        for function, code in self._functions:
            if not all(map(is_, _code(function), code)):
                pairs = zip(CODE, code, strict=True)
                changed += [(function, n, v) for n, v in pairs if getattr(function, n) is not v]
        for owner, name, value in changed:
            setattr(owner, name, value)
        names = {f"{getattr(o, '__name__', type(o).__name__)}.{n}" for o, n, _ in changed}
        changes = {
            "replaced": sorted(names),
            "changed": self._process.restore(),
        }
        parts = [f"{verb} {', '.join(what[:3])}" for verb, what in changes.items() if what]
        if parts:
            raise TamperingError("; ".join(parts))


def _definitions() -> tuple[list[tuple[Any, dict[str, Any]]], list[tuple[FunctionType, Code]]]:
    """Return what modules and classes of sparsebench define, and the code of each function."""
    namespaces: list[tuple[Any, dict[str, Any]]] = []
    definitions: list[Any] = []
    for title, module in list(sys.modules.items()):
        if title.partition(".")[0] == "sparsebench":
            values = {name: value for name, value in vars(module).items() if callable(value)}
            namespaces.append((module, values))
            definitions += [v for v in values.values() if getattr(v, "__module__", None) == title]
    for owner in [value for value in definitions if isinstance(value, type)]:
        members = {
            name: member
            for name, member in vars(owner).items()
            if isinstance(member, FunctionType | property | classmethod | staticmethod)
        }
        namespaces.append((owner, members))
        definitions += members.values()
    functions = [value for value in definitions if isinstance(value, FunctionType)]
    return namespaces, [(function, _code(function)) for function in functions]


def _code(function: FunctionType) -> Code:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _get(owner: Any, name: str) -> Any:
    """Return what a name means; for a class, its own member as it is written."""
    inherited = getattr(owner, name, None)
    return vars(owner).get(name, inherited) if isinstance(owner, type) else inherited
