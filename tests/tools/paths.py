"""Where things are in the checkout."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
KERNELS = ROOT / "kernels"
PUBLISHED = ROOT / "results" / "published"


def cuda_source(name: str) -> str:
    """Return the text of a CUDA C++ file of kernels/, whichever family's it is."""
    (path,) = KERNELS.glob(f"*/{name}")
    return path.read_text()
