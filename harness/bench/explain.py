"""Why something failed, for who wrote it: a traceback that names no path of this machine.

    File "sparsebench/kernels/bsr/bsr_wgmma.py", line 212, in prepared

A frame names its module in the place of its file.
"""

import traceback
from collections.abc import Iterator

LONGEST = 20_000  # characters; the last ones stay


def explained(error: BaseException) -> str:
    """Return the traceback of an error and of what caused it, with modules for files."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as unsayable:  # its text is code of a contender
        text = f"{type(error).__name__}, whose text cannot be had: {type(unsayable).__name__}\n"
    for file, module in set(_modules(error)):
        text = text.replace(f'File "{file}"', f'File "{module.replace(".", "/")}.py"')
    return text if len(text) <= LONGEST else f"...\n{text[-LONGEST:]}"


def _modules(error: BaseException | None) -> Iterator[tuple[str, str]]:
    """Yield the file and the module of each frame, also of causes and contexts."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame.f_code.co_filename, str(frame.f_globals.get("__name__", "?"))
        error = error.__cause__ or error.__context__
