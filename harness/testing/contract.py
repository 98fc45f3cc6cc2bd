"""A contract is a list of sentences, each with a call that raises if the sentence is not true."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Check:
    """One sentence of a contract; str() gives the sentence, for the id of a parametrised test."""

    sentence: str
    holds: Callable[[], object]

    def __call__(self) -> None:
        """Raise AssertionError, with expected and found, if the sentence is not true.

        Exceptions of the plug-in itself are passed through.
        """
        self.holds()

    def __str__(self) -> str:
        return self.sentence


def checker(checks: Callable[Arguments, Sequence[Check]]) -> Callable[Arguments, None]:
    """Return a function that runs the checks of a contract up to the first failure."""

    def check(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        for each in checks(*arguments, **keywords):
            each()

    check.__doc__ = f"Raise AssertionError unless the contract holds. {checks.__doc__}"
    return check


def expect(condition: object, message: str) -> None:
    """Raise AssertionError unless the condition holds, even with python -O."""
    if not condition:
        raise AssertionError(message)
