"""What a shell completes beyond commands and options: suites, kernels, models, GPUs and paths.

Nothing here imports torch or pandas: a Tab may take a tenth of a second.
"""

from collections.abc import Callable, Iterable
from glob import glob

from sparsebench._discovery import documents, modules
from sparsebench._gpus import gpus_with_advice


def models() -> list[str]:
    from sparsebench.results.model_shapes import MODELS

    return [model.name for model in MODELS]


NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "suite": lambda: documents("suites"),
    "kernel": lambda: modules("kernels"),
    "model": models,
    "gpu": gpus_with_advice,
}


def complete(kind: str) -> Callable[[str], list[str]]:
    """Return typer's `autocompletion` for names of a kind, or paths that begin alike."""

    def completed(incomplete: str) -> list[str]:
        names = [n for n in sorted(NAMES[kind]()) if n.lower().startswith(incomplete.lower())]
        return [*names, *(glob(f"{incomplete}*") if incomplete else ())]

    return completed
