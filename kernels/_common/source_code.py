"""Digests of the code of kernels, which say whether a cached choice was made by the same code."""

import ast
import hashlib
import re
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, DEDENT, INDENT, NEWLINE, NL, STRING, generate_tokens

BREAKS = {NEWLINE: ";", INDENT: "{", DEDENT: "}"}  # tokens before a statement


@cache
def source(kernel: str) -> str:
    """Return a digest of a kernel's code and of the kernels it imports; "" for no kernel.

    The digest leaves out comments, docstrings, layout, import lines and shared files (_NAME.py,
    NAME.cuh), so a file that moves keeps its entries. NAME_dgrad without a file has that of NAME.
    """
    python = next(Path(str(files("sparsebench.kernels"))).glob(f"*/{kernel}.py"), None)
    if python is None:
        forward = kernel.removesuffix("_dgrad")
        return source(forward) if forward != kernel else ""
    cuda = python.with_suffix(".cu")
    code = python.read_text("utf-8")
    parts = [bare_python(code), bare_cuda(cuda.read_text("utf-8")) if cuda.exists() else ""]
    parts += [source(name) for name in sorted(_kernels_imported(code))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def bare_python(code: str) -> str:
    """Return Python code without comments, layout, imports and statements that are a string.

    All spaces are removed, because Python 3.12 splits f-strings, which are one token in 3.11.
    """
    tokens, before, importing = [], NEWLINE, False
    for token in generate_tokens(StringIO(code).readline):
        if token.type in (COMMENT, NL):
            continue
        starts = before in BREAKS
        importing = token.string in ("import", "from") if starts else importing
        if not importing:
            is_text = starts and token.type == STRING
            tokens.append(BREAKS.get(token.type, "" if is_text else token.string))
        before = token.type
    return "".join("".join(tokens).split()).replace(";;", ";").replace("{;", "{")


def bare_cuda(code: str) -> str:
    """Return C++ code without comments and layout."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", code, flags=re.DOTALL).split())


def _kernels_imported(code: str) -> set[str]:
    """Return the kernels that Python code imports; names with an underscore are not kernels."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    ours = (name.split(".")[2:] for name in names if name.startswith("sparsebench.kernels."))
    return {parts[1] for parts in ours if not any(part.startswith("_") for part in parts[:2])}
