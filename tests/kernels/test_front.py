"""Calls without Python, compiled for this machine, with a stand-in for the driver."""

import copy
import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import front
from tests.tools.marks import needs_gxx

pytestmark = [
    needs_gxx,
    pytest.mark.exhaustive,  # compiles for 15 s
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there"),
]
COLUMNS = 8


class Owner:
    """Memory that a launch reads."""


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the class Front, whose launches write 2 X into Y and count themselves."""

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config: int, function: int, parameters: int, extra: int) -> int:
        x, y = (
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0]
            for pointer in ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[:2]
        )
        count = int(ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))[0]) * COLUMNS
        floats = ctypes.c_float * count
        for i, value in enumerate(floats.from_address(x)):
            floats.from_address(y)[i] = 2 * value
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
    def stream(device: int, out: Any) -> int:
        out[0] = 7
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    def capturing(stream: int, out: Any) -> int:
        out[0] = 0
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        file: Path = front._built()
        assert front._built() == file  # the second time from the cache
    module = front._load(file)
    functions = launch, stream, capturing
    module.connect(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    module.functions = functions  # alive as long as the module
    x = torch.randn(1, COLUMNS)
    module.Front(x, COLUMNS, 0)(x)  # a thread's first call takes the path in Python
    return module.Front


def add(made: Any, x: torch.Tensor, owners: list[Any] | None = None) -> None:
    """Record one launch for as many tokens as X has."""
    y = torch.empty(len(x), COLUMNS)
    image, places = b"\0" * 16, [(0, 0), (1, 8)]
    step = (1, len(x), 32, 0, [], image, [0, 8], places)
    made.add(x, [y], [step], None, owners or [], None)


def recorded(kind: Any, holder: dict[str, Any], x: torch.Tensor, limit: int = 0) -> Any:
    made = kind(x, COLUMNS, limit)
    made.guard(holder, "w", holder["w"])
    made.guard(holder, "bias", holder.get("bias"))
    add(made, x)
    return made


def test_a_recording_runs_on_other_addresses_and_shapes(kind: Any) -> None:
    holder = {"w": torch.ones(3)}
    x = torch.randn(6, COLUMNS)
    made = recorded(kind, holder, x)
    for other in (x, torch.randn(6, COLUMNS), torch.randn(2, 3, COLUMNS)):
        assert torch.equal(made(other), 2 * other)
    assert made(torch.randn(5, COLUMNS)) is None  # not recorded
    assert made(x.double()) is None
    assert made(x[:, :4]) is None
    assert not made.stale


@pytest.mark.parametrize("change", ["write", "swap", "bias"])
def test_a_guard_that_fails_makes_the_recordings_stale(kind: Any, change: str) -> None:
    holder: dict[str, Any] = {"w": torch.ones(3)}
    x = torch.randn(6, COLUMNS)
    made = recorded(kind, holder, x)
    assert made(x) is not None
    if change == "write":
        holder["w"].mul_(2)
    elif change == "swap":
        holder["w"] = torch.ones(3)
    else:
        holder["bias"] = torch.ones(3)
    assert made(x) is None
    assert made.stale


def test_gradients_modes_and_subclasses_take_the_path_in_python(kind: Any) -> None:
    holder = {"w": torch.nn.Parameter(torch.ones(3))}
    x = torch.randn(6, COLUMNS)
    made = recorded(kind, holder, x)
    assert made(x) is None  # w needs a gradient
    with torch.no_grad():
        assert made(x) is not None
        with torch.autocast("cpu"):
            assert made(x) is None
        assert made(x.as_subclass(type("Other", (torch.Tensor,), {}))) is None
    with torch.inference_mode():
        assert made(x) is None  # recorded outside of it
    assert not made.stale


def test_the_path_in_python_is_due_after_a_number_of_calls(kind: Any) -> None:
    x = torch.randn(6, COLUMNS)
    made = recorded(kind, {"w": torch.ones(3)}, x, limit=4)
    results = [made(x) is not None for _ in range(6)]
    assert results == [True, True, True, False, False, False]
    assert (made.due(), made.due()) == (True, False)
    assert made(x) is not None


def test_the_oldest_recording_makes_room_and_lets_its_owners_go(kind: Any) -> None:
    x, owner = torch.randn(1, COLUMNS), Owner()
    made, freed = kind(x, COLUMNS, 0), weakref.ref(owner)
    add(made, x, [owner])
    del owner
    assert freed() is not None
    for tokens in range(2, 70):
        add(made, torch.randn(tokens, COLUMNS))
    assert freed() is None
    assert made(x) is None
    last = torch.randn(69, COLUMNS)
    assert torch.equal(made(last), 2 * last)


def test_a_weight_that_holds_its_recordings_is_freed(kind: Any) -> None:
    x, owner = torch.randn(1, COLUMNS), Owner()
    owner.front = kind(x, COLUMNS, 0)  # type: ignore[attr-defined]
    add(owner.front, x, [owner])  # type: ignore[attr-defined]
    freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed() is None


def test_a_copy_has_no_recording(kind: Any) -> None:
    assert copy.deepcopy(kind(torch.randn(1, COLUMNS), COLUMNS, 0)) is None
