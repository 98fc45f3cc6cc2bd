"""The training text: the source files of Python's standard library, or samples from a file.

    sorted files   a.py  b.py  c.py ... p.py | q.py ...     every 16th file, or sample, is held out
    contexts       bytes [start : start + context + 1]      each byte except the first is a target

The text leaves out tests, which some installations lack, tables of character sets, and files that
are generated or installed on one machine. The digest identifies the text, which differs between
versions of Python. Samples, such as images, are the rows of a .npy file; each is one context.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.results.files import fault

HELD_OUT_EVERY = 16
LEFT_OUT = {"test", "tests", "encodings", "site-packages", "dist-packages"}
GENERATED = "_sysconfig"  # prefix of a file with the paths and flags of one machine


@dataclass(frozen=True)
class Text:
    """Training and held-out bytes, uint8 [bytes]; the SHA-256 covers both, in this order.

    row  bytes of a sample; contexts begin at multiples of it
    """

    name: str
    sha256: str
    seen: Tensor
    unseen: Tensor
    row: int = 1


def standard_library(folder: Path | None = None) -> Text:
    """Return the text of a standard library, by default that of the running Python.

    Raises SuiteError if the folder has too few source files to hold one out.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = [path.read_bytes() for path in _files(folder)]
    unseen = b"".join(files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    if not unseen:
        expected = f"at least {HELD_OUT_EVERY} source files of Python"
        raise SuiteError(f"{folder}: expected {expected}; found {len(files)}")
    del files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    seen = b"".join(files)
    return _text(f"Python {platform.python_version()}'s standard library", seen, unseen)


def samples(path: Path) -> Text:
    """Return the samples of a .npy file, uint8 [samples, bytes]. Raises SuiteError."""
    expected = f"{path}: expected uint8 [samples, bytes] with at least {HELD_OUT_EVERY} samples"
    try:
        rows = np.load(path, allow_pickle=False)
    except OSError as error:
        raise SuiteError(f"{expected}; found {fault(error)}") from error
    except (ValueError, EOFError) as error:
        raise SuiteError(f"{expected}; found a file that is not .npy") from error
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
        kind = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else "an archive"
        raise SuiteError(f"{expected}; found {kind}")
    if len(rows) < HELD_OUT_EVERY or rows.shape[1] < 2:
        raise SuiteError(f"{expected} of 2 bytes; found {list(rows.shape)}")
    held_out = np.arange(len(rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return _text(path.stem, rows[~held_out].tobytes(), rows[held_out].tobytes(), rows.shape[1])


def contexts(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return int64 [starts, context + 1]: bytes; the last one is only a target."""
    positions = starts[:, None] + torch.arange(context + 1, device=starts.device)
    return text[positions].long()


def evenly(text: Tensor, count: int, context: int) -> Tensor:
    """Return int64 [count or fewer, context + 1]: evenly spread contexts without overlap."""
    room = len(text) // (context + 1)
    count = min(count, room)
    starts = torch.arange(count) * (room // max(count, 1)) * (context + 1)
    return contexts(text, starts, context)


def _text(name: str, seen: bytes, unseen: bytes, row: int = 1) -> Text:
    first, last = (torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (seen, unseen))
    return Text(name, hashlib.sha256(seen + unseen).hexdigest(), first, last, row)


def _files(folder: Path) -> list[Path]:
    """Return the source files, sorted by path so that the order is the same on every machine."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - LEFT_OUT
        sources = (name for name in names if name.endswith(".py"))
        paths += [Path(parent, name) for name in sources if not name.startswith(GENERATED)]
    return sorted(filter(Path.is_file, paths), key=lambda path: path.parts)
