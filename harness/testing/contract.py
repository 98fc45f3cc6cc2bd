"""A contract is a list of sentences, each with a call that raises where it does not hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One sentence of a contract. As text it is the sentence: the id of a parametrised test."""

    sentence: str
    holds: Callable[[], None]

    def __call__(self) -> None:
        """Raise AssertionError, with what was expected and found, where the sentence is not true.

        What the plug-in itself raises comes through as it is.
        """
        self.holds()

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


def expect(condition: object, message: str) -> None:
    """Raise AssertionError unless the condition holds; Python's -O leaves this one in."""
    if not condition:
        raise AssertionError(message)


def every(checks: Iterable[Check]) -> None:
    """Run all checks; the first that fails ends it."""
    for check in checks:
        check()
