"""Keep what is made of a weight's index beside the weight: each plan of the weight reads it.

Blocks of 64 in 12288 x 4096 took 40 ms to cut and 50 ms to list for each number of features, but a
plan for another number of tokens changes neither. What is large is shared by the plans that use it:
a search for 1 to 512 tokens makes 27 orders of 2.5 MB on the device, and keeps those it chooses.
"""

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

W = TypeVar("W")
P = ParamSpec("P")
T = TypeVar("T")
ATTRIBUTE = "_sparsebench_made"  # attribute of a weight


class _Made:
    """What was made of a weight, by function and arguments."""

    def __init__(self) -> None:
        self.lasting: dict[Any, Any] = {}
        self.weak: WeakValueDictionary[Any, Any] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as an empty object of a type that torch.load accepts."""
        return OrderedDict, ()


def made_once(make: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Call make(w, *args) once for each weight and arguments; it reads no values of the weight."""
    return _made(make, lambda made: made.lasting)


def made_while_used(make: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Call make(w, *args) again only if its result is no longer in use; else as `made_once`."""
    return _made(make, lambda made: made.weak)


def _made(
    make: Callable[Concatenate[W, P], T], place: Callable[[_Made], MutableMapping[Any, Any]]
) -> Callable[Concatenate[W, P], T]:
    @wraps(make)
    def made(w: W, /, *args: P.args, **options: P.kwargs) -> T:
        if not isinstance(every := w.__dict__.get(ATTRIBUTE), _Made):
            every = w.__dict__[ATTRIBUTE] = _Made()
        store, key = place(every), (make, *args, *options.items())
        if (result := store.get(key)) is None:
            result = store[key] = make(w, *args, **options)
        return result

    return made
