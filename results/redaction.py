"""A bundle without what names a user, a host or a folder: what is published of a run.

    /home/ada/models/gate.safetensors  ─>  gate.safetensors        paths, by their last part
    "hostname": "node17"               ─>  (removed)               fields that name user or host
    ada, node17 anywhere else          ─>  user, host              found in paths and those fields
    worker.log, failures.log           ─>  (not copied)            they hold whatever kernels print

Ids of cases and problems stay as they are: they hash no path. A file that nothing was removed from
is copied byte for byte. If a file has changed, the copy is sealed anew; removed.json, beside the
bundle, names the SHA-256 of the manifest before, and all that was removed.
"""

import gzip
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsebench.results import bundle

NOTE = "removed.json"
QUOTED = re.compile(
    r'(?<=")(?:~|/)[^"\\\n]*/[^"\\\n]*(?=")'
)  # a string that is a path, with spaces
START = r"(?:file://|(?<=\\[nt])|(?<![\w.~/\\]))"  # no part of a word, of a ratio or of a URL
PATH = re.compile(START + r"(?:~|/[\w.+@=-]+)(?:/[\w.+@=-]+)+/?")
WINDOWS = re.compile(r"\b[A-Za-z]:\\{1,2}(?:[\w.+@ -]+\\{1,2})+[\w.+@-]*")
HOME = re.compile(r"/(?:home|Users)/([\w.-]{2,})/")
FIELD = re.compile(r'(,\s*)?"(user|username|login|host|hostname|node)":\s*"([^"]*)"(?(1)|\s*,?\s*)')
SHORTEST = 3  # a shorter name, of a user or a host, is also part of words


@dataclass(frozen=True)
class Removed:
    """What is not in a published bundle.

    of     SHA-256 of the manifest before: the name of the bundle as it was measured
    texts  what was removed, without the names themselves: "a path: gate.safetensors", times
    files  files that were not copied
    """

    of: str
    texts: dict[str, int]
    files: list[str]


def redact(run: Path, to: Path) -> Removed:
    """Copy a bundle into an empty folder without names and paths; seal it anew if it changed."""
    names, found = bundle.verify(run), Counter[str]()
    texts = {name: bundle.content(run, name).decode("utf-8", "replace") for name in names}
    known = _names(texts)
    changed = False
    for name, text in texts.items():
        clean = _clean(text, known, found)
        changed |= clean != text
        _write(to / name, clean.encode() if clean != text else bundle.content(run, name))
    if changed:
        bundle.seal_files(to, names)
    else:
        (to / bundle.MANIFEST).write_bytes(bundle.content(run, bundle.MANIFEST))
    left = [name for name in ("worker.log", "failures.log") if (run / name).exists()]
    removed = Removed(bundle.identity(run), dict(sorted(found.items())), left)
    (to / NOTE).write_text(json.dumps(asdict(removed), indent=1) + "\n", "utf-8")
    return removed


def note(published: Path) -> Removed:
    """Read what was removed from a published bundle."""
    return Removed(**json.loads((published / NOTE).read_text("utf-8")))


def _names(texts: dict[str, str]) -> dict[str, str]:
    """Return the names of users and hosts that a bundle gives away, and the word for each."""
    users = {name for text in texts.values() for name in HOME.findall(text)}
    fields = [match for text in texts.values() for match in FIELD.findall(text)]
    users |= {value for _, name, value in fields if name in ("user", "username", "login")}
    hosts = {value for _, name, value in fields if name in ("host", "hostname", "node")}
    named = dict.fromkeys(hosts, "host") | dict.fromkeys(users - {"root"}, "user")
    return {name: word for name, word in named.items() if len(name) >= SHORTEST}


def _clean(text: str, known: dict[str, str], found: Counter[str]) -> str:
    def without_field(match: re.Match[str]) -> str:
        found[f"a field: {match[2]}"] += 1
        return ""

    def last_part(match: re.Match[str]) -> str:
        last = re.split(r"[/\\]+", match[0].rstrip("/\\"))[-1]
        last = known.get(last, last)
        found[f"a path: {last}"] += 1
        return last

    text = FIELD.sub(without_field, text)
    for pattern in (QUOTED, PATH, WINDOWS):
        text = pattern.sub(last_part, text)
    for name, word in known.items():
        text, count = re.subn(rf"(?<![\w]){re.escape(name)}(?![\w])", word, text)
        if count:
            found[f"a name: of a {word}"] += count
    return text


def _write(file: Path, content: bytes) -> None:
    """Write a file of a bundle; rows are packed, and equal rows give equal files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name == bundle.ROWS:
        file.with_name(f"{bundle.ROWS}.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    else:
        file.write_bytes(content)


def slug(gpu: str, suite: str, digest: str) -> str:
    """Return the name of a run in a link: GPU, suite and the first 10 digits of its manifest.

    It never changes: runs that are added later do not number it anew.
    """
    words = re.sub(r"[^a-z0-9]+", "-", f"{gpu} {suite}".lower()).strip("-")[:60].strip("-")
    return "-".join(filter(None, [words, digest[:10]]))
