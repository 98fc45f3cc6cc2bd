"""Read what host and device share from NAME.cu, which alone declares it: parameters and records.

    struct alignas(16) Item { int first, count, token, slices; };    record(NAME, "Item"): a dtype
    multiply(const __grid_constant__ Maps maps, const Item* items, int m)    arguments_of: a Layout

The host fills records by the names of their fields, and packs arguments in the order of the
parameters, structs field by field. Maps and arrays are bytes.

This is not a compiler. It reads fields that are numbers, pointers, vectors, structs and arrays of
these, whose lengths are numbers, macros or constants, and #if of one macro or of several with &&.
"""

import ctypes
import re
from functools import cache
from pathlib import Path
from struct import Struct, calcsize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

HEADERS = Path(__file__).parent  # *.cuh for all families; others are beside their kernels
MAP_BYTES = 128
NUMBERS = {  # formats of `struct` and of NumPy
    **{"char": "b", "unsigned char": "B", "u16": "H", "unsigned short": "H", "float": "f"},
    **{"int": "i", "u32": "I", "long long": "q", "u64": "Q"},
}
TYPE = r"(?:const )?(long long|unsigned \w+|\w+) ?"
FIELD = re.compile(rf"{TYPE}(\**) ?(\w+)((?:\[\w+\])*)")
POINTER = np.dtype("P")


Constants = tuple[tuple[str, int], ...]
Arguments = tuple[Any, Any]
"""Pointers to the arguments, for cuLaunchKernel, and the memory that holds the arguments."""


class Layout:
    """A kernel's parameters as formats of `struct`: Layout("128s", "P")(map, address)."""

    def __init__(self, *parameters: str) -> None:
        """Place the parameters one after the other; the driver copies each into the kernel."""
        sizes = [calcsize("".join(parameters[: i + 1])) for i in range(len(parameters))]
        self._starts = [end - calcsize(p) for end, p in zip(sizes, parameters, strict=True)]
        self._pack = Struct("".join(parameters)).pack
        self._memory = ctypes.c_char * max(sizes, default=0)
        self._pointers = ctypes.c_void_p * len(parameters)

    def __call__(self, *args: float | bytes) -> Arguments:
        """Return the arguments in new memory, which is never changed."""
        memory = self._memory.from_buffer_copy(self._pack(*args))
        base = ctypes.addressof(memory)
        return self._pointers(*[base + start for start in self._starts]), memory


class CType(NamedTuple):
    """A type of C++: how NumPy stores it, and its alignment in bytes."""

    dtype: np.dtype[Any]
    alignment: int


@cache
def record(name: str, struct: str, constants: Constants = ()) -> np.dtype[Any]:
    """Return a struct of NAME.cu or of its headers as a NumPy dtype with its fields.

    constants  the macros that its arrays and #if read
    """
    return _type_of(struct, code_of(name, constants), dict(constants)).dtype


@cache
def arguments_of(name: str, function: str, constants: Constants) -> Layout:
    """Return the layout of the parameters of a kernel of NAME.cu."""
    code = code_of(name, constants)
    (parameters,) = re.findall(rf"\b{function}\(([^)]*)\) {{", code)
    statements = parameters.replace("__grid_constant__ ", "").replace(", ", ";")
    kinds = [kind for _, kind in _fields(statements, code, dict(constants))]
    return Layout(*[("0P" if kind.alignment >= 8 else "") + _format(kind.dtype) for kind in kinds])


def listed(kind: np.dtype[Any], **fields: Tensor) -> Tensor:
    """Return records as int32 [records, words], on the device of `fields`; the others are zero."""
    some, places = next(iter(fields.values())), dict(kind.fields or {})
    words = some.new_zeros(len(some), kind.itemsize // 4, dtype=torch.int64)
    for name, values in fields.items():
        word, byte = divmod(places[name][1], 4)
        words[:, word] |= values.long() << 8 * byte
    return words.to(torch.int32)


def source_of(name: str) -> Path:
    """Return the path of NAME.cu in the folder of its family."""
    return next(HEADERS.parent.glob(f"*/{name}.cu"))


@cache
def code_of(name: str, constants: Constants) -> str:
    """Return NAME.cu with its headers and with what #if leaves, without comments and layout."""
    macros, lines = dict(constants), list[str]()
    branches = [(True, True)]  # of each #if: whether it is open now, and whether it may not be
    for line in _included(source_of(name)).splitlines():
        code = line.split("//")[0].strip()
        word, _, rest = code.partition(" ")
        now, closed = branches[-1]
        if word in ("#if", "#ifdef"):
            opens = now and _holds(rest, macros)
            branches.append((opens, opens or not now))
        elif word in ("#elif", "#else"):
            opens = not closed and (word == "#else" or _holds(rest, macros))
            branches[-1] = opens, closed or opens
        elif word == "#endif":
            branches.pop()
        elif now:
            lines.append(code)
    return " ".join(" ".join(lines).split())


def _included(source: Path) -> str:
    """Return the text of a file, with the headers that it includes in their place."""

    def text(include: re.Match[str]) -> str:
        header = source.parent / include[1]
        return _included(header if header.exists() else HEADERS / include[1])

    return re.sub('#include "(.*)"', text, source.read_text("utf-8"))


def _holds(condition: str, macros: dict[str, int]) -> bool:
    """Return whether a condition of #if or #ifdef holds."""
    for part in condition.split("&&"):
        inverted, macro, sign, number = re.findall(r"(!?)(\w+)(?: (==|>) (\d+))?", part)[0]
        value = macros.get(macro, 0)
        least = int(number or 0)
        if (value == least if sign == "==" else value > least) == bool(inverted):
            return False
    return True


def _type_of(name: str, code: str, macros: dict[str, int]) -> CType:
    if name in NUMBERS:
        number = np.dtype(NUMBERS[name])
        return CType(number, number.itemsize)
    if name == "TensorMap":
        return CType(np.dtype((np.void, MAP_BYTES)), 64)
    if vector := re.fullmatch(r"(uint|float)([24])", name):
        each, count = np.dtype(vector[1][0].replace("u", "I")), int(vector[2])
        return CType(np.dtype([(axis, each) for axis in "xyzw"[:count]]), 4 * count)
    if alias := re.search(rf"using {name} = (\w+);", code):
        return _type_of(alias[1], code, macros)
    alignment, body = re.findall(rf"struct (?:alignas\((\d+)\) )?{name} {{(.*?)}};", code)[0]
    named = _fields(body, code, macros)
    most, end, offsets = max(int(alignment or 1), *(k.alignment for _, k in named)), 0, list[int]()
    for _, kind in named:
        offsets.append(-(-end // kind.alignment) * kind.alignment)
        end = offsets[-1] + kind.dtype.itemsize
    layout = {
        "names": [field for field, _ in named],
        "formats": [kind.dtype for _, kind in named],
        **{"offsets": offsets, "itemsize": -(-end // most) * most},
    }
    return CType(np.dtype(layout), most)  # type: ignore[call-overload]


def _fields(body: str, code: str, macros: dict[str, int]) -> list[tuple[str, CType]]:
    """Return the fields that the statements of a struct declare."""
    named = list[tuple[str, CType]]()
    for statement in filter(None, map(str.strip, body.split(";"))):
        first, *others = statement.split(", ")
        word = re.match(TYPE, first)
        assert word
        for field in (first, *(f"{word[1]} {other}" for other in others)):
            kind, stars, name, lengths = FIELD.fullmatch(field).groups()  # type: ignore[union-attr]
            each = CType(POINTER, 8) if stars else _type_of(kind, code, macros)
            shape = tuple(_length(n, code, macros) for n in re.findall(r"\w+", lengths))
            dtype = np.dtype((each.dtype, shape)) if shape else each.dtype
            named.append((name, CType(dtype, each.alignment)))
    return named


def _length(name: str, code: str, macros: dict[str, int]) -> int:
    if name.isdigit():
        return int(name)
    return macros[name] if name in macros else int(re.findall(rf"\b{name} = (\d+)[,;]", code)[0])


def _format(kind: np.dtype[Any]) -> str:
    """Return a type in formats of `struct`, with all padding; maps and arrays are bytes."""
    if kind.fields is None:
        is_number = kind.subdtype is None and kind.kind != "V"
        return kind.char if is_number else f"{kind.itemsize}s"
    parts, end = "", 0
    for dtype, at, *_ in kind.fields.values():
        parts += "x" * (at - end) + _format(dtype)
        end = at + dtype.itemsize
    return parts + "x" * (kind.itemsize - end)
