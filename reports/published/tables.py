"""What results/published/README.md shows: a table is a few lines of this list.

A heading, and the tables below it. `_table.py` says what the fields mean and how figures are made.
"""

from collections.abc import Mapping, Sequence

from sparsebench.reports.published._summary import Question
from sparsebench.reports.published._table import Table

OURS = "ours"
PEERS = "not ours"
SPARSE_PEERS = "not ours and format != 'dense'"
DENSE = "kernel in ('cublas', 'torch_compile', 'torch_dense')"
STRONGEST = "kernel in ('cublas', 'torch_compile', 'torch_dense', 'cublas_ffn', 'ffn_dense_triton')"
LIBRARY = "kernel.str.startswith('cusparselt')"
EAGER = "the faster of eager cuBLAS and torch.compile"
BEST_DENSE = "the fastest dense layer (cublas_ffn and ffn_dense_triton too)"
ALL_PEERS = "the fastest peer, dense included"

LAYERS = {
    "51200 × 5120": "Qwen3-32B, gate and up (51200 × 5120)",
    "5120 × 25600": "Qwen3-32B, down (5120 × 25600)",
    "55296 × 5120": "Seed-OSS-36B, gate and up (55296 × 5120)",
    "5120 × 27648": "Seed-OSS-36B, down (5120 × 27648)",
    "28672 × 4096": "Llama-3-8B, gate and up (28672 × 4096)",
    "4096 × 14336": "Llama-3-8B, down (4096 × 14336)",
    "25600 × 5120": "Qwen3-32B (25600 × 5120)",
    "27648 × 5120": "Seed-OSS-36B (27648 × 5120)",
    "14336 × 4096": "Llama-3-8B (14336 × 4096)",
}
OPS = {"linear": "forward", "linear_dgrad": "dX", "linear_wgrad": "dW"}
UNTUNED = "options.str.contains('tuned=False')"
TUNED = "options.str.contains('tuned=True')"


def _untuned(kernel: str) -> Table:
    title = f"`{kernel}` tuned, over itself without a search or a table"
    ours, over = (f"kernel == '{kernel}' and {how}" for how in (TUNED, UNTUNED))
    name = f"untuned-{kernel}"
    runs, rows = ("untuned",), ("op", "m")
    return Table(name, title, runs, ours, rows, (), "", over, "itself untuned", names=OPS)


def _lead(
    name: str, runs: tuple[str, ...], rows: tuple[str, ...], names: Mapping[str, str]
) -> list[Table]:
    """Return our fastest kernel against every peer, and against the sparse ones alone."""
    both = (("peers", PEERS, ALL_PEERS), ("sparse", SPARSE_PEERS, "the fastest sparse peer"))
    return [
        Table(
            f"{name}-{key}", f"Ours over {said}", runs, OURS, rows, (), "", over, said,
            names=names,
        )
        for key, over, said in both
    ]  # fmt: skip


def _spense(name: str, title: str, run: str) -> Table:
    rows, columns = ("shape", "dtype"), ("m",)
    return Table(name, title, (run,), "kernel == 'spense_wgmma'", rows, columns, names=LAYERS)


def _spense_lead(run: str) -> Table:
    title = "`spense_wgmma` over cuSPARSELt, each layout searched"
    ours = "kernel == 'spense_wgmma'"
    rows = ("dtype", "m")
    name = f"{run}-library"
    return Table(name, title, (run,), ours, rows, (), "", LIBRARY, "cuSPARSELt or its hybrid")


def _ffn(name: str, title: str, where: str, over: str, against: str) -> Table:
    ours = "kernel in ('ffn_sparse', 'mlp_sparse') and options == 'way=best'"
    rows, columns = ("shape", "active"), ("m",)
    runs = ("ffn", "ffn-others")
    return Table(name, title, runs, ours, rows, columns, where, over, against)


PERHAPS = {  # runs without which a table has fewer cells, or is left out
    *("ffn-others", "openai-gradients", "sparsity-slow"),
    *("ffn-authors", "decoder", "decoder-whole", "decoder-look", "unstructured", "chain", "calls"),
}
SPARSE = "level == 0.9"
QUESTIONS = [
    Question("Do large blocks pay?", "sparsity-4096", f"block == '128' and {SPARSE}"),
    Question("Do small blocks pay?", "sparsity-4096", f"block == '16' and {SPARSE}"),
    Question("At 64 tokens?", "sparsity-64", f"block == '32' and {SPARSE}"),
    Question("At one token?", "decode", f"m == 1 and n == 14336 and block == '64' and {SPARSE}"),
    Question(
        "In the gradient of X?", "training", f"op == 'linear_dgrad' and block == '64' and {SPARSE}",
    ),
    Question(
        "In the gradient of W?", "training", f"op == 'linear_wgrad' and block == '64' and {SPARSE}",
    ),
    Question(
        "Does 2:4 pay at few tokens?", "spense-two-four",
        "m == 16 and n == 51200 and dtype == 'bf16'", "kernel == 'spense_wgmma'",
    ),
    Question(
        "In an MLP, half of it dense?", "spense-ffn", "m == 16 and n == 25600 and dtype == 'fp8'",
    ),
    Question(
        "Do sparse activations pay?", "ffn",
        "op == 'ffn' and m == 4096 and n == 5632 and active == 29 and skew == 'iid'",
    ),
    Question(
        "In a training step?", "ffn-step", "m == 16384 and active == 29 and skew == 'iid'",
    ),
]  # fmt: skip

SECTIONS: Mapping[str, Sequence[Table]] = {
    "Block-sparse layers by sparsity and block": [
        Table("sparsity-4096", "4096 tokens", ("sparsity-4096",), OURS, ("block",), ("asked",)),
        Table("sparsity-64", "64 tokens", ("sparsity-64",), OURS, ("block",), ("asked",)),
        *_lead("sparsity-4096", ("sparsity-4096",), ("block",), {}),
        *_lead("sparsity-64", ("sparsity-64",), ("block",), {}),
    ],
    "Gradients": [
        Table(
            "training", "Forward, dX and dW", ("training",), OURS, ("op", "block"), ("asked",),
            names=OPS,
        ),
        *_lead("training", ("training",), ("op",), OPS),
    ],
    "Few tokens": [
        Table(
            "decode", "1 to 64 tokens", ("decode",), OURS, ("shape", "block", "asked"), ("m",),
        ),
        *_lead("decode", ("decode",), ("m",), {}),
    ],
    "Among other layers, and from Python": [
        Table(
            "chain", "A layer alone (kernel), and one of eight in a CUDA graph (chain)",
            ("chain",), OURS, ("shape", "block", "m"), ("scope",),
        ),
        Table(
            "calls", "Device time (kernel), and a call from Python (op)", ("calls",), OURS,
            ("shape", "asked", "m"), ("scope",), "cache == 'cold'",
        ),
    ],
    "Zeros anywhere": [
        Table(
            "unstructured", "In a bitmap", ("unstructured",), "kernel == 'bitmap_mma'",
            ("shape", "dtype", "asked"), ("m",),
        ),
    ],
    "cuSPARSE": [
        Table(
            "sparsity-slow", "CSR and BSR", ("sparsity-slow",), "format != 'dense'",
            ("kernel", "block"), ("asked",),
        ),
    ],
    "A decoding step": [
        Table(
            "decoder", "An eighth of Qwen3-32B, MLPs pruned", ("decoder",), OURS,
            ("pattern", "asked", "dtype"), ("m",), "layers == 8 and context == 1024",
        ),
        Table(
            "decoder-whole", "All of Qwen3-32B, half of each MLP 2:4",
            ("decoder-whole", "decoder-look"), OURS, ("dtype", "context"), ("m",), "layers == 64",
        ),
    ],
    "Block sizes and patterns": [
        Table(
            "blocks", "Patterns, each at the best block to store", ("blocks",), OURS,
            ("pattern", "block"), ("asked",),
        ),
    ],
    "Shapes": [
        Table(
            "shapes", "Layers of language models", ("shapes",), OURS,
            ("pattern", "shape", "block", "asked"), ("m",),
        ),
        *_lead("shapes", ("shapes",), ("m",), {}),
    ],
    "Wider at the same cost": [
        Table(
            "openai", "Time of layers with equally many weights", ("openai",), OURS,
            ("pattern", "block", "dtype"), ("n",), "op == 'linear' and pattern != 'dense'",
            value="us",
        ),
        Table(
            "openai-dense", "Time of dense layers as wide", ("openai",), "kernel == 'cublas'",
            ("dtype",), ("n",), "op == 'linear' and pattern != 'scale_free' and block == '32'",
            value="us",
        ),
        *_lead("openai", ("openai", "openai-gradients"), ("op", "dtype"), OPS),
    ],
    "2:4 beside a dense region": [
        _spense("spense-two-four", "All 2:4", "spense-two-four"),
        _spense("spense-decode", "Half dense, few tokens", "spense-decode"),
        _spense("spense-prefill", "Half dense, many tokens", "spense-prefill"),
        Table(
            "spense-ffn", "A whole gated MLP, half dense", ("spense-ffn",),
            "kernel == 'spense_ffn'", ("shape", "dtype"), ("m",), over=STRONGEST,
            against="the fastest dense MLP", names=LAYERS,
        ),
        *(_spense_lead(run) for run in ("spense-two-four", "spense-decode", "spense-prefill")),
        Table(
            "spense-calls", "As called from Python, and the kernel alone", ("spense-calls",),
            "kernel in ('cublas', 'spense_wgmma', 'cusparselt')", ("shape", "dtype", "m"),
            ("label", "scope"), value="us", names=LAYERS,
        ),
        Table(
            "spense-mma", "`spense_wgmma` over `spense_mma`", ("spense-decode", "spense-prefill"),
            "kernel == 'spense_wgmma'", ("m",), (), "", "kernel == 'spense_mma'", "`spense_mma`",
        ),
    ],
    "2:4 by dense fraction": [
        Table(
            "spense-pareto", "From all 2:4 to all dense", ("spense-pareto",),
            "kernel == 'spense_wgmma'", ("shape", "dtype", "m"), ("asked",), names=LAYERS,
        ),
    ],
    "Sparse activations": [
        _ffn("ffn", "Units on at random", "op == 'ffn' and skew == 'iid'", DENSE, EAGER),
        _ffn(
            "ffn-strongest", "The same, over the fastest dense layer",
            "op == 'ffn' and skew == 'iid'", STRONGEST, BEST_DENSE,
        ),
        _ffn("ffn-zipf", "Units of unlike frequency", "skew == 'zipf'", DENSE, EAGER),
        _ffn("ffn-correlated", "Tokens of sequences", "skew == 'correlated'", DENSE, EAGER),
        _ffn("ffn-mlp", "Without a gate", "op == 'mlp'", DENSE, EAGER),
        Table(
            "ffn-sparse", "Never dense (`way=sparse`), whatever pays",
            ("ffn", "ffn-others"), "options == 'way=sparse'",
            ("op", "shape", "active"), ("m",), "skew == 'iid'", DENSE, EAGER,
        ),
    ],
    "Sparse activations beside the authors' kernels": [
        Table(
            "ffn-authors", "TwELL as its authors wrote it, and ours", ("ffn-authors",),
            "kernel in ('ffn_sparse', 'ffn_twell', 'twell_authors')", ("kernel",), ("m",),
        ),
    ],
    "Formats beside each other": [
        Table(
            "ffn-formats", "One pruned layer, sparse activations, BSR and 2:4", ("ffn-formats",),
            OURS, ("pattern", "asked", "kernel"), ("m",), over=DENSE, against=EAGER,
        ),
    ],
    "Training with sparse activations": [
        Table(
            "ffn-step", "A step: forward and all gradients", ("ffn-step",), OURS,
            ("active", "skew"), ("m",), over="kernel == 'torch_compile'", against="torch.compile",
        ),
        Table(
            "ffn-step-eager", "The same, over eager cuBLAS", ("ffn-step",), OURS,
            ("active", "skew"), ("m",), over="kernel == 'cublas'", against="eager cuBLAS",
        ),
    ],
    "Activations of trained layers": [
        Table(
            "trained", "Layers of small language models", ("trained",),
            "kernel == 'ffn_sparse' and options == 'way=best'", ("active",), ("m",), over=DENSE,
            against=EAGER,
        ),
    ],
    "What tuning saves": [
        _untuned(kernel)
        for kernel in ("bsr_triton", "bsr_wgmma", "bsr_small", "dense_triton", "torch_bsr")
    ],
    "Patterns that pruning left behind": [
        Table(
            "dlmc", "The fastest sparse format, by pattern file", ("dlmc",), "format != 'dense'",
            ("source", "dtype"), ("m",),
        ),
        Table(
            "dlmc-csr", "`csr_cuda` over cuSPARSE's CSR", ("dlmc-csr",), "kernel == 'csr_cuda'",
            ("dtype", "m"), (), "", "kernel == 'cusparse_csr'", "cuSPARSE's CSR",
        ),
    ],
}  # fmt: skip
