"""A contract is a list of sentences, each with a call that raises if the sentence is not true."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One sentence of a contract; str() gives the sentence, for the id of a parametrised test."""

    sentence: str
    holds: Callable[[], None]

    def __call__(self) -> None:
        """Raise AssertionError, with expected and found, if the sentence is not true.

        Exceptions of the plug-in itself are passed through.
        """
        self.holds()

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


def expect(condition: object, message: str) -> None:
    """Raise AssertionError unless the condition holds, even with python -O."""
    if not condition:
        raise AssertionError(message)


def every(checks: Iterable[Check]) -> None:
    """Run all checks up to the first failure."""
    for check in checks:
        check()
