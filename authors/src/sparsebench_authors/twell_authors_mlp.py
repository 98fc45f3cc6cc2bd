"""Feed-forward layer without a gate by TwELL's authors: two of their CUDA kernels.

    hidden   act(X @ Wu.T), packed       words of value and place; 31 for each 256 units
    Y        hidden @ Wd.T               a warp per token and part of the output

The number of parts of the output is searched. The kernels are those of their TwELLMLP, whose first
call builds them; this peer takes them from torch's folder of extensions.

    needs    --peers DIR with a checkout (_builds.py), and their built extension; compute
             capability 9.0
    the rest as in twell_authors.py: bf16 and relu, k 2048, n 5632 or 8192, m padded to a multiple
             of 256, no graph, and more than 31 of 256 active units are lost

Source: github.com/SakanaAI/sparser-faster-llms, MIT licence, custom_models/twell_modules.
"""

from dataclasses import replace

from torch import Tensor

from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench_authors import _builds
from sparsebench_authors.twell_authors import MARKER, Gate, unsupported_layer

SPLITS = 1, 2, 4, 8  # parts of the output
LOADER = "TwELLMLP"


def prepare(operands: Operands, *, num_splits: int | None = None) -> Launch:
    """Choose the number of parts unless it is given or pinned. Raises Unsupported."""
    folder = foreign_code.checkout(MARKER)
    assert folder
    twell = _builds.imported(folder / MARKER)
    name = twell._ext_name_for_algorithms(twell._resolve_algorithms_with_deps(["twell_mlp"]))
    file = _builds.built_by_authors(name, MARKER, LOADER)
    ext = _builds.imported(file, name)
    gate = Gate(operands, "wu", twell, ext)
    down = operands.weights["wd"].to_dense().t().contiguous()

    def layer(num_splits: int) -> Tensor:
        return gate.then(
            lambda x, packed, out: twell.matmul_t2d_out(packed, down, out, num_splits, ext=ext)
        )

    choices = [{"num_splits": n} for n in (SPLITS if num_splits is None else (num_splits,))]
    digest = _builds.digest((folder / MARKER).parent)
    launch = fastest_choice(layer, choices, operands, **gate.tokens.choice, digest=digest)
    return replace(launch, lost=gate.lost)


KERNEL = Kernel("mlp", "twell", "cuda", prepare, unsupported_layer)
