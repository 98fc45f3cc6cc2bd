"""The three announcements that sparsebench began with, sentence by sentence: announcements.txt.

    # title, and the address below it
    - a sentence, shortened; numbers are as published
      > the claims (suites/claims) that test it, or "none:" and the reason, in which
        [text](path) leads to a file of this project

`sparsebench claims sentences` prints them with verdicts.
"""

import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Sentence:
    """What an announcement says, the claims that test it, and why there are none."""

    says: str
    claims: tuple[str, ...]
    untested: str


@dataclass(frozen=True)
class Announcement:
    """An announcement and everything in it that can be true or false."""

    title: str
    url: str
    sentences: tuple[Sentence, ...]


def _announcement(text: str) -> Announcement:
    head, *items = text.split("\n- ")
    title, url = head.split("\n")
    parts = [" ".join(item.split()).split(" > ") for item in items]
    sentences = (
        Sentence(says, (), answer.removeprefix("none: "))
        if answer.startswith("none: ")
        else Sentence(says, tuple(answer.split()), "")
        for says, answer in parts
    )
    return Announcement(title, url, tuple(sentences))


TEXT = files("sparsebench.results.claims").joinpath("announcements.txt").read_text("utf-8")
ANNOUNCEMENTS = tuple(map(_announcement, re.split("^# ", TEXT.strip(), flags=re.MULTILINE)[1:]))
CLAIMS = dict.fromkeys(
    claim for one in ANNOUNCEMENTS for each in one.sentences for claim in each.claims
)
"""The names of all claims of the announcements, in their order."""
