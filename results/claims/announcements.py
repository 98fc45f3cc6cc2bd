"""The three announcements that sparsebench began with, sentence by sentence.

Each sentence names the claims (suites/claims) that test it, or says why none does. Sentences are
shortened; numbers are as published. `sparsebench claims sentences` prints them with verdicts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sentence:
    """What an announcement says, the claims that test it, and why there are none."""

    says: str
    claims: tuple[str, ...] = ()
    untested: str = ""


@dataclass(frozen=True)
class Announcement:
    """An announcement and everything in it that can be true or false."""

    title: str
    url: str
    sentences: tuple[Sentence, ...]


def _says(says: str, *claims: str, untested: str = "") -> Sentence:
    return Sentence(says, claims, untested)


ANNOUNCEMENTS = (
    Announcement(
        "OpenAI, Block-sparse GPU kernels (December 2017)",
        "https://openai.com/index/block-sparse-gpu-kernels",
        (
            _says("orders of magnitude faster than cuBLAS", "openai-2017-cublas"),
            _says("orders of magnitude faster than cuSPARSE", "openai-2017-cusparse"),
            _says(
                "at 12,288 units, ten times as fast as cuBLAS with 90 % zeros; more over cuSPARSE",
                "openai-2017-ideal",
                "openai-2017-cusparse",
            ),
            _says(
                "state-of-the-art results in text sentiment analysis and in generating text and "
                "images",
                "openai-2017-text-and-images",
            ),
            _says(
                "the cost is only proportional to the number of non-zero blocks",
                "openai-2017-wider",
                "openai-2017-ideal",
            ),
            _says(
                "networks can be much wider and deeper at a given budget of parameters and "
                "computation",
                "openai-2017-wider",
                "openai-2017-generalise",
            ),
            _says("efficient in fully connected layers", "openai-2017-ideal"),
            _says(
                "efficient in convolutional layers, sparse in their input and output features",
                untested="no op of a convolution; with 1 × 1 filters it is the op linear",
            ),
            _says("blocks of 8, 16 and 32", "openai-2017-training"),
            _says(
                "the pattern of the blocks is completely configurable",
                untested="no number; the tests of kernels/bsr use arbitrary patterns",
            ),
            _says(
                "memory for the parameters is only proportional to the non-zero weights",
                untested="true of the format by arithmetic: formats/README.md has the bytes",
            ),
            _says("gradients at about the rate of the product (paper)", "openai-2017-training"),
            _says(
                "LSTMs of almost twenty thousand units, 5 times wider at similar parameters, model "
                "text better",
                "openai-2017-generalise",
                "openai-2017-text-and-images",
            ),
            _says(
                "information spreads in small worlds within a few steps",
                untested="a property of the graph; openai-2017-generalise compares small worlds "
                "with uniform patterns",
            ),
            _says(
                "the sparse model beats the dense one on all sentiment data, IMDB from 5.91 to "
                "5.01 % errors",
                untested="not measured: it needs a model of reviews, and labelled reviews",
            ),
            _says(
                "1.048 bits per character instead of 1.059 at equal parameters",
                "openai-2017-generalise",
                "openai-2017-text-and-images",
            ),
            _says(
                "2.90 bits per dimension instead of 2.92 on CIFAR-10, deeper and block-sparse",
                "openai-2017-text-and-images",
            ),
        ),
    ),
    Announcement(
        "Sakana AI and NVIDIA, Sparser, Faster, Lighter Transformer Language Models (TwELL, 2026)",
        "https://arxiv.org/abs/2603.23198",
        (
            _says(
                "an L1 term gives over 99 % sparsity with negligible loss of accuracy",
                "twell-2026-active-units",
            ),
            _says(
                "inference is 17.0 to 20.5 % faster from 0.5 to 2 billion parameters",
                "twell-2026-inference",
            ),
            _says(
                "up to 30 % faster inference over a sweep",
                "twell-2026-inference-best",
                "twell-2026-sparser",
            ),
            _says(
                "training is 21.9 % faster at 2 billion parameters, up to 24 %",
                "twell-2026-training",
            ),
            _says("energy of inference falls by up to 17 %", "twell-2026-energy"),
            _says("peak memory of training falls by 24 % and more", "twell-2026-memory"),
            _says("the benefits grow with the model", "twell-2026-scaling"),
            _says(
                "a new packing format and kernels that fit into the pipelines of modern GPUs",
                "twell-2026-overflow",
                "twell-2026-flex",
            ),
            _says("a layer's speedup follows its active units (paper)", "twell-2026-correlation"),
            _says(
                "variants: without a gate, with a warm-up, with dead neurons initialised again "
                "(paper)",
                "twell-2026-non-gated",
                "twell-2026-warm-up",
                "twell-2026-reinitialised",
            ),
        ),
    ),
    Announcement(
        "Snowflake AI Research, SpenseGPT (June 2026)",
        "https://arxiv.org/abs/2606.10445",
        (
            _says("2:4 sparsity has a theoretical speedup of up to 2", "nvidia-two-four"),
            _says(
                "strict 2:4 often degrades accuracy in pruning after training",
                untested="no threshold; results/published/pruning has the losses of two models",
            ),
            _says(
                "other relaxed formats need a compiler, or lose time when they run",
                "slidesparse-2026",
            ),
            _says(
                "the hybrid relaxes the effective sparsity, and is still faster",
                "spense-2026-relaxed",
            ),
            _says(
                "it works with existing sparse and dense libraries, without a compiler or expanded "
                "inputs",
                "spense-2026-libraries",
            ),
            _says(
                "which regions stay dense is important",
                untested="no threshold; harness/NOTES.md has the losses of both strategies",
            ),
            _says(
                "up to 1.2 × end-to-end decoding speedup on B200 in fp8",
                "spense-2026-end-to-end",
            ),
            _says(
                "accuracy is preserved",
                untested="needs the 32 and 36 billion parameters of its models; "
                "results/published/pruning has the loss of smaller ones",
            ),
            _says(
                "the first one-shot pruning with a real end-to-end speedup on recent GPUs",
                untested="a statement about the literature",
            ),
            _says(
                "the speed of layers at prefill and at decode (paper)",
                "spense-2026-prefill-kernel",
                "spense-2026-decode-kernel",
                "spense-2026-fp8",
            ),
        ),
    ),
)

CLAIMS = dict.fromkeys(
    claim for one in ANNOUNCEMENTS for each in one.sentences for claim in each.claims
)
"""The names of all claims of the announcements, in their order."""
