"""The contract of a format: to_dense returns what from_dense was given, and -0.0 is zero."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats._format import BITS, Format, has_value
from sparsebench.harness.catalog import load_format
from sparsebench.harness.testing.contract import Check, checker, expect

DTYPES = torch.float16, torch.bfloat16, torch.float32
SHAPES = (1, 1), (3, 5), (16, 16), (33, 64), (64, 128), (70, 31), (256, 256)
SPECIAL = -0.0, float("nan"), float("inf"), -float("inf"), 6e-8


def format_checks(
    name: str, examples: Sequence[Tensor] = (), *, device: str = "cpu", **params: Any
) -> list[Check]:
    """Return the contract of a format, sentence by sentence.

    `name` is the format's name in a suite. The format must hold every one of `examples`, matrices
    [rows, columns], or of its own. Without any, it must hold a 256 x 256 matrix with 2 non-zeros in
    each 4 of a row, and may refuse others; a format of masks holds ones there. `params` are those
    of from_dense.
    """
    matrices = [example.to(device) for example in examples or load_format(name).examples()]
    must = matrices or [two_of_four((256, 256)).to(device)]
    may = matrices or [m.to(device) for s in SHAPES for m in (two_of_four(s), matrix(s, 0.05))]
    if load_format(name).operand == "masks" and not matrices:
        must, may = ([(m != 0).float() for m in group] for group in (must, may))

    def stored(dense: Tensor) -> Format:
        return load_format(name).from_dense(dense, **params)

    def held(dtype: torch.dtype) -> Iterator[tuple[Tensor, Format]]:
        for example in may:
            for dense in (example.to(dtype), torch.zeros_like(example, dtype=dtype)):
                try:
                    yield dense.clone(), stored(dense)
                except FormatError:
                    continue

    about: dict[str, Callable[[], None]] = {
        "holds its example matrices": partial(_holds, must, stored),
        "refuses what is not a matrix": partial(_refuses, device, stored),
        "counts the bytes of its arrays": partial(_counts, held),
        "samples other matrices at the positions that it stores": partial(_samples, held),
    }
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        about[f"gives back a matrix of {kind}"] = partial(_round_trips, dtype, held)
        about[f"keeps every value of {kind}"] = partial(_keeps, dtype, may, stored)
    return [Check(f"{name} {sentence}", holds) for sentence, holds in about.items()]


def matrix(shape: tuple[int, int], density: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values at random positions; the same ones each time."""
    draw = torch.Generator().manual_seed(0)
    values, places = torch.randn(shape, generator=draw), torch.rand(shape, generator=draw)
    return values.to(dtype).where(places < density, 0)


def two_of_four(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a matrix that any format can hold: 2 of each 4 elements along a row."""
    return matrix(shape, 1.0, dtype).where(torch.arange(shape[1]) % 4 < 2, 0)


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element, with -0.0 as +0.0."""
    whole = tensor.view(BITS[tensor.element_size()])
    return whole.where(has_value(whole), 0)


check_format = checker(format_checks)

Store = Callable[[Tensor], Format]
Held = Callable[[torch.dtype], Iterator[tuple[Tensor, Format]]]


def _holds(must: Sequence[Tensor], stored: Store) -> None:
    for example in must:
        try:
            stored(example.bfloat16())
        except FormatError as error:
            message = f"expected it to hold a matrix {list(example.shape)}, found {error!r}"
            raise AssertionError(f"{message}; `examples` names matrices that it is for") from error


def _refuses(device: str, stored: Store) -> None:
    bad: dict[str, Any] = {
        "a vector": torch.zeros(4, device=device),
        "a matrix of integers": torch.zeros(4, 4, dtype=torch.int32, device=device),
        "a matrix that is not contiguous": torch.zeros(8, 4, device=device).T,
        "an array of numpy": torch.zeros(4, 4).numpy(),
        "a sparse tensor": torch.zeros(4, 4, device=device).to_sparse(),
        "a matrix without rows": torch.zeros(0, 4, device=device),
        "a matrix without columns": torch.zeros(4, 0, device=device),
    }
    for what, tensor in bad.items():
        try:
            stored(tensor)
        except FormatError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"{what}: expected FormatError, found {error!r}") from error
        else:
            raise AssertionError(f"{what}: expected FormatError, found that it is stored")
        clear = "expected" in message and "found" in message and "\n" not in message
        expect(clear, f"{what}: expected one line `expected ..., found ...`, found {message!r}")


def _round_trips(dtype: torch.dtype, held: Held) -> None:
    for dense, packed in held(dtype):
        back, shape = packed.to_dense(), dense.shape
        what = f"a matrix {list(shape)}"
        expect(packed.shape == shape, f"{what}: expected its shape, found {packed.shape}")
        expect(back.shape == shape, f"{what}: expected its shape back, found {list(back.shape)}")
        expect(back.dtype == dtype, f"{what}: expected {dtype} back, found {back.dtype}")
        expect(back.is_contiguous(), f"{what}: expected a contiguous one back")
        expect(back.device == dense.device, f"{what}: expected it on {dense.device}")
        wrong = int((bits(back) != bits(dense)).sum())
        expect(not wrong, f"{what}: expected the same bits back, found {wrong} other elements")


def _keeps(dtype: torch.dtype, may: Sequence[Tensor], stored: Store) -> None:
    for example in may:
        places = example.nonzero()[[0, -1]].unbind(1) if example.any() else None
        for special in SPECIAL if places else ():
            dense = torch.zeros_like(example, dtype=dtype)
            dense[places] = special
            try:
                back = stored(dense.clone()).to_dense()
            except FormatError:
                continue
            expected, actual = bits(dense)[places].tolist(), bits(back)[places].tolist()
            message = f"expected {special} to be kept, its bits {expected[-1]}, found {actual[-1]}"
            same = torch.equal(bits(back), bits(dense))
            expect(same, f"a matrix {list(dense.shape)}: {message}")


def _counts(held: Held) -> None:
    for dense, packed in held(torch.bfloat16):
        arrays = packed.arrays()
        size = sum(array.untyped_storage().nbytes() for array in arrays.values())
        message = f"expected the bytes of its arrays' memory, {size}, found {packed.stored_bytes}"
        if packed.stored_bytes < size:
            message += "; an array is a view of more memory, so clone it"
        expect(packed.stored_bytes == size, f"a matrix {list(dense.shape)}: {message}")
        for name, array in arrays.items():
            expect(array.is_contiguous(), f"expected a contiguous array {name!r}")
            expect(array.device == dense.device, f"expected {name!r} on {dense.device}")


def _samples(held: Held) -> None:
    for dense, packed in held(torch.float16):
        ones = torch.ones(dense.shape, device=dense.device)
        other = matrix((dense.shape[0], dense.shape[1]), 1.0, torch.float64).to(dense.device)
        try:
            places, sampled = packed.sample(ones).to_dense(), packed.sample(other)
        except FormatError:  # the operation is optional
            return
        what = f"a matrix {list(dense.shape)}"
        all_places = bool((places.bool() | (dense == 0)).all())
        expect(all_places, f"{what}: expected every non-zero to have a place")
        right = torch.equal(sampled.to_dense(), other.where(places == 1, 0))
        expect(right, f"{what}: expected the other matrix's values, and zeros elsewhere")
        arrays, indices = sampled.arrays(), packed.arrays()
        expect(arrays.keys() == indices.keys(), f"{what}: expected the arrays {[*indices]}")
        values = int(arrays["values"].count_nonzero())
        expect(values == int(places.sum()), f"{what}: expected zeros where it is padded")
        for name in indices.keys() - {"values"}:
            expect(torch.equal(arrays[name], indices[name]), f"{what}: expected its own {name!r}")
