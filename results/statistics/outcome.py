"""The five words for the outcome of every comparison, and the rule that picks one.

    faster         1 | [=====]             the whole interval is above 1
    slower           [=====] | 1           the whole interval is below 1
    equal          1/1.01 |  [=|=]  | 1.01 the whole interval is within MARGIN of 1
    not settled    [===|=======]           anything else
    not measured                           one side has no time

The terminal, reports, the site, `compare` and claims use these words and no others. `equal` is an
equivalence test, two one-sided tests at 2.5 % (Schuirmann 1987): at most 2.5 % of runs give it for
a ratio at or beyond the margin. It comes first, so 1.004 [1.002, 1.006] is equal.
"""

from enum import StrEnum

MARGIN = 0.01  # for `equal`; 8 processes can show it if the sd is 1 %, as for short calls
FALSE_DISCOVERIES = 0.05  # expected share of wrong outcomes among all that are faster or slower


class Outcome(StrEnum):
    """The outcome of a comparison of two times; the value is the word that every reader sees."""

    FASTER = "faster"
    SLOWER = "slower"
    EQUAL = "equal"
    NOT_SETTLED = "not settled"
    NOT_MEASURED = "not measured"


DIFFERENT = (Outcome.FASTER, Outcome.SLOWER)
UNDECIDED = (Outcome.EQUAL, Outcome.NOT_SETTLED)
VERDICTS = (*DIFFERENT, *UNDECIDED)
"""The outcomes that an interval can have."""

MEANINGS = {
    Outcome.FASTER: "The whole interval of the ratio of times is above 1: the kernel takes less "
    "time. Among many cases, at most 5 % of those called faster or slower are expected to be wrong "
    "(Benjamini & Hochberg).",
    Outcome.SLOWER: "The whole interval is below 1: the kernel takes more time. The word is never "
    "used for a ratio of speedups.",
    Outcome.EQUAL: f"The whole interval is within {100 * MARGIN:g} % of 1. There may be a smaller "
    "difference, which does not matter.",
    Outcome.NOT_SETTLED: "The interval allows more than one of these answers. In a look, which has "
    "a range instead, the range holds 1 or comes within the noise floor of it. More processes, or "
    "a second card, may settle it.",
    Outcome.NOT_MEASURED: "A side has no time: the kernel does not support the case, failed, or "
    "gave a wrong result. The row gives the reason.",
}
"""The definition of each word, as the glossary of the site and the foot of each report show it."""

STYLES = {
    Outcome.FASTER: "good",
    Outcome.SLOWER: "bad",
    Outcome.EQUAL: "quiet",
    Outcome.NOT_SETTLED: "unsure",
    Outcome.NOT_MEASURED: "unsure",
}
"""The style of each word in a table (reports/tables.py)."""


def outcome(low: float, high: float, margin: float = MARGIN) -> Outcome:
    """Return the outcome of a ratio's interval; a margin of 0.01 is 1 %."""
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return Outcome.EQUAL
    if low > 1:
        return Outcome.FASTER
    return Outcome.SLOWER if high < 1 else Outcome.NOT_SETTLED


def among_many(low: float, high: float, q: float) -> Outcome:
    """Return the outcome of one of many ratios; faster and slower need q <= FALSE_DISCOVERIES."""
    word = outcome(low, high)
    return Outcome.NOT_SETTLED if word in DIFFERENT and q > FALSE_DISCOVERIES else word
