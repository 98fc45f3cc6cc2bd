"""The text to train on: the source files of Python's own standard library, byte by byte.

    sorted files   a.py  b.py  c.py ... p.py | q.py ...     every 16th is held out, whole
    contexts       bytes [start : start + context + 1]      each byte but the first is a target

Left out are tests, which some installations lack, tables of character sets, and what is generated
or installed on one machine. Other versions of Python are other texts: the digest says which.
"""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsebench.errors import SuiteError

HELD_OUT_EVERY = 16
LEFT_OUT = {"test", "tests", "encodings", "site-packages", "dist-packages"}
GENERATED = "_sysconfig"  # the start of a name; the file has paths and flags of one machine


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, uint8 [bytes]; the SHA-256 is of both in this order."""

    name: str
    sha256: str
    seen: Tensor
    unseen: Tensor


def standard_library(folder: Path | None = None) -> Text:
    """Return the text of a standard library; default: that of the Python that runs."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(_files(folder)):
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(path.read_bytes())
    seen, unseen = (b"".join(part) for part in parts)
    if not unseen:
        expected = f"at least {HELD_OUT_EVERY} source files of Python"
        raise SuiteError(f"{folder}: expected {expected}; found {len(parts[0])}")
    digest = hashlib.sha256(seen + unseen).hexdigest()
    name = f"Python {platform.python_version()}'s standard library"
    return Text(name, digest, _numbers(seen), _numbers(unseen))


def contexts(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return int64 [starts, context + 1]: bytes, the last of them a target alone."""
    places = starts[:, None] + torch.arange(context + 1, device=starts.device)
    return text[places].long()


def evenly(text: Tensor, count: int, context: int) -> Tensor:
    """Return int64 [count or fewer, context + 1]: contexts apart and evenly spread."""
    room = len(text) // (context + 1)
    count = min(count, room)
    starts = torch.arange(count) * (room // max(count, 1)) * (context + 1)
    return contexts(text, starts, context)


def _numbers(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _files(folder: Path) -> list[Path]:
    """List the sources by name, in the same order on every machine."""
    found = {path.relative_to(folder): path for path in folder.rglob("*.py") if path.is_file()}
    kept = [
        name
        for name in found
        if not LEFT_OUT & {*name.parts} and not name.name.startswith(GENERATED)
    ]
    return [found[name] for name in sorted(kept, key=lambda name: name.parts)]
