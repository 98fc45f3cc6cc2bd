"""Detect contenders that change operands, which are the other contenders' too.

    ArrayGuard  dense weights and activations, recordings, right answers, and every array of a
                format that several contenders share. If one has changed, the contest begins again
                without the contender (stages.py)

It is checked after each conversion, after each prepare with its first run, after each output check
and while timing, beside the settings of the process (process_state.py). A contender that changed
something is wrong; the others are not affected. This guards against mistakes of the package's own
kernels; code from outside the package has a process of its own (guest.py).

A checksum reads an array twice, in 4-byte words w laid out in rows of COLUMNS:

    sum over rows r of  a_r sum_c w_rc   +   sum over columns c of  b_c sum_r w_rc      modulo 2^64

a and b are odd random numbers of 64 bits, drawn anew in each process. A change of one word is
multiplied by a + b, which is even: so a word is short, and its highest bit is not lost.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.inputs.bits import CHUNK

COLUMNS = 4096
WORD = 4  # bytes


class TamperingError(Exception):
    """A contender changed memory or settings that are not its own."""


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

    def _totals(self, watched: Iterable[WatchedArray]) -> list[int]:
        return self._sums(array for w in watched if (array := w.array()) is not None)

    def _sums(self, arrays: Iterable[Tensor]) -> list[int]:
        sums = [checksum(array, self.seed) for array in arrays]
        return torch.stack(sums).tolist() if sums else []


def checksum(array: Tensor, seed: int) -> Tensor:
    """Return an int64 of an array's bits and their places, on its device.

    Adding d to two opposite corners of a rectangle of the table, and -d to the other two, does not
    change it. torch sums int32 in a copy of 64 bits, so the words are summed in pieces. Keys of
    16 GiB then take a copy of 512 MiB on a GPU, and not one of 32 GiB.
    """
    words, step = _words(array), CHUNK[array.device.type] // COLUMNS
    rows = -(-len(words) // COLUMNS)
    of_rows, of_columns = _odd(seed, rows, array.device), _odd(~seed, COLUMNS, array.device)
    full = len(words) // COLUMNS
    table, rest = words[: full * COLUMNS].view(full, COLUMNS), words[full * COLUMNS :]
    total = (rest * of_columns[: len(rest)]).sum() * (2 * full + 1)
    for piece, factors in zip(table.split(step), of_rows[:full].split(step), strict=True):
        wide = piece.long()
        total += (wide.sum(1) * factors).sum() + (wide.sum(0) * of_columns).sum()
    return total


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
    return flat.view(torch.int32)


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
