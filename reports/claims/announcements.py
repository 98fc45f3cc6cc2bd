"""The announcements sentence by sentence (results/claims/announcements.py), with verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsebench.reports.claims.sheets import STYLES
from sparsebench.reports.tables import markdown_table
from sparsebench.results.claims.announcements import ANNOUNCEMENTS, CLAIMS, Sentence
from sparsebench.results.claims.verdict import Verdict

Verdicts = Mapping[str, Sequence[Verdict]]
HEADS = "the announcement says", "claims and verdicts"


def markdown(verdicts: Verdicts) -> str:
    """Return a heading and a table for each announcement."""
    parts = []
    for announcement in ANNOUNCEMENTS:
        table = markdown_table(
            HEADS, [[each.says, _answer(each, verdicts)] for each in announcement.sentences]
        )
        parts.append(f"### [{announcement.title}]({announcement.url})\n\n{table}")
    return "\n\n".join(parts)


def for_site(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Return what the page of all claims shows; nothing if it lacks a claim of an announcement."""
    if not CLAIMS.keys() <= verdicts.keys():
        return []
    return [
        {
            "title": one.title,
            "url": one.url,
            "sentences": [
                {
                    "says": each.says,
                    "untested": each.untested,
                    "claims": [
                        (name, _word(verdicts[name][0]), STYLES[verdicts[name][0].word])
                        for name in each.claims
                    ],
                }
                for each in one.sentences
            ],
        }
        for one in ANNOUNCEMENTS
    ]


def _answer(sentence: Sentence, verdicts: Verdicts) -> str:
    claims = [f"[{name}]({name}.yaml): {_word(verdicts[name][0])}" for name in sentence.claims]
    return "; ".join(claims) or f"none: {sentence.untested.replace('](', '](../../')}"


def _word(verdict: Verdict) -> str:
    """Write the first verdict: `refuted on H200`, `not settled on H200, tends to partly`."""
    where = f" on {verdict.device.removeprefix('NVIDIA ')}" if verdict.device else ""
    tendency = f", tends to {verdict.tendency}" if verdict.tendency else ""
    return f"{verdict.word}{where}{tendency}"
