"""The three announcements that sparsebench began with, sentence by sentence.

    # title, and the address below it
    - a sentence, shortened; numbers are as published
      > the claims (suites/claims) that test it, or "none:" and the reason

`sparsebench claims sentences` prints them with verdicts.
"""

import re
from dataclasses import dataclass

TEXT = """\
# OpenAI, Block-sparse GPU kernels (December 2017)
https://openai.com/index/block-sparse-gpu-kernels
- orders of magnitude faster than cuBLAS
  > openai-2017-cublas
- orders of magnitude faster than cuSPARSE
  > openai-2017-cusparse
- at 12,288 units, ten times as fast as cuBLAS with 90 % zeros; more over cuSPARSE
  > openai-2017-ideal openai-2017-cusparse
- cuSPARSE, and cuBLAS called for each block, stay below dense cuBLAS (paper)
  > cusparse-slower
- state-of-the-art results in text sentiment analysis and in generating text and images
  > openai-2017-text-and-images
- the cost is only proportional to the number of non-zero blocks
  > openai-2017-wider openai-2017-ideal
- with as many parameters, a wider and sparser layer computes at a higher rate (paper)
  > openai-2017-wider
- networks can be much wider and deeper at a given budget of parameters and computation
  > openai-2017-wider openai-2017-generalise
- efficient in fully connected layers
  > openai-2017-ideal
- efficient in convolutional layers, sparse in their input and output features
  > none: no op of a convolution; with 1 × 1 filters it is the op linear
- blocks of 8, 16 and 32
  > openai-2017-training
- the pattern of the blocks is completely configurable
  > none: no number; the tests of kernels/bsr use arbitrary patterns
- memory for the parameters is only proportional to the non-zero weights
  > none: true of the format by arithmetic: formats/README.md has the bytes
- gradients at about the rate of the product (paper)
  > openai-2017-training
- the gradient of the weights is faster if one call sums those of eight steps (paper)
  > none: one call of linear_wgrad sums over all tokens
- LSTMs of almost twenty thousand units, 5 times wider at similar parameters, model text better
  > openai-2017-generalise openai-2017-text-and-images
- information spreads in small worlds within a few steps
  > none: a property of the graph; openai-2017-generalise compares small worlds with uniform
    patterns
- more than four internal steps per character gain nothing (paper)
  > none: no LSTM is trained here
- the sparse model beats the dense one on all sentiment data, IMDB from 5.91 to 5.01 % errors
  > none: not measured: it needs a model of reviews, and labelled reviews
- 1.048 bits per character instead of 1.059 at equal parameters
  > openai-2017-generalise openai-2017-text-and-images
- 2.90 bits per dimension instead of 2.92 on CIFAR-10, deeper and block-sparse
  > openai-2017-text-and-images
# Sakana AI and NVIDIA, Sparser, Faster, Lighter Transformer Language Models (TwELL, 2026)
https://arxiv.org/abs/2603.23198
- an L1 term gives over 99 % sparsity with negligible loss of accuracy
  > twell-2026-active-units
- inference is 17.0 to 20.5 % faster from 0.5 to 2 billion parameters
  > twell-2026-inference
- up to 30 % faster inference over a sweep
  > twell-2026-inference-best twell-2026-sparser
- training is 21.9 % faster at 2 billion parameters, up to 24 %
  > twell-2026-training
- training is 1.5 % slower at 0.5 billion parameters, 7.1 and 11.6 % faster at 1 and 1.5 (paper)
  > twell-2026-training twell-2026-scaling
- energy of inference falls by up to 17 %
  > twell-2026-energy
- peak memory of training falls by 24 % and more
  > twell-2026-memory
- the benefits grow with the model
  > twell-2026-scaling
- a new packing format and kernels that fit into the pipelines of modern GPUs
  > twell-2026-overflow twell-2026-flex
- a layer's speedup follows its active units (paper)
  > twell-2026-correlation
- early layers and the first tokens of a sequence have the most active units (paper)
  > none: no speed; harness/NOTES.md counts the units of small models
- more than 30 % of the units are never active (paper)
  > none: no speed; harness/NOTES.md counts the dead units of small models
- an RTX PRO 6000 is 1.34 and 2.1 × as fast as an H100 in two steps of training (paper)
  > none: needs an RTX PRO 6000, and times of kernels within a step
- variants: without a gate, with a warm-up, with dead neurons initialised again (paper)
  > twell-2026-non-gated twell-2026-warm-up twell-2026-reinitialised
# Snowflake AI Research, SpenseGPT (June 2026)
https://arxiv.org/abs/2606.10445
- 2:4 sparsity has a theoretical speedup of up to 2
  > nvidia-two-four
- products of an MLP that is all 2:4 gain 1.1 to 1.8 × on B200 in fp8 (paper)
  > nvidia-two-four
- strict 2:4 often degrades accuracy in pruning after training
  > none: no threshold; results/published/pruning has the losses of two models
- other relaxed formats need a compiler, or lose time when they run
  > slidesparse-2026
- the hybrid relaxes the effective sparsity, and is still faster
  > spense-2026-relaxed
- it works with existing sparse and dense libraries, without a compiler or expanded inputs
  > spense-2026-libraries
- which regions stay dense is important
  > none: no threshold; harness/NOTES.md has the losses of both strategies
- pruning takes 1.9 and 2.2 hours on one B200 (paper)
  > none: needs the 32 and 36 billion parameters of its models
- AMD's libraries can run it, too
  > none: no AMD GPU is measured
- up to 1.2 × end-to-end decoding speedup on B200 in fp8
  > spense-2026-end-to-end
- 1.20 and 1.23 × for Qwen3-32B and Seed-OSS-36B, and 1.06 and 0.99 × by SlideSparse (paper)
  > spense-2026-end-to-end slidesparse-2026
- accuracy is preserved
  > none: needs the 32 and 36 billion parameters of its models; results/published/pruning has
    the loss of smaller ones
- the first one-shot pruning with a real end-to-end speedup on recent GPUs
  > none: a statement about the literature
- the speed of layers at prefill and at decode (paper)
  > spense-2026-prefill-kernel spense-2026-decode-kernel spense-2026-fp8
"""


@dataclass(frozen=True)
class Sentence:
    """What an announcement says, the claims that test it, and why there are none."""

    says: str
    claims: tuple[str, ...]
    untested: str


@dataclass(frozen=True)
class Announcement:
    """An announcement and everything in it that can be true or false."""

    title: str
    url: str
    sentences: tuple[Sentence, ...]


def _announcement(text: str) -> Announcement:
    head, *items = text.split("\n- ")
    title, url = head.split("\n")
    parts = [" ".join(item.split()).split(" > ") for item in items]
    sentences = (
        Sentence(says, (), answer.removeprefix("none: "))
        if answer.startswith("none: ")
        else Sentence(says, tuple(answer.split()), "")
        for says, answer in parts
    )
    return Announcement(title, url, tuple(sentences))


ANNOUNCEMENTS = tuple(map(_announcement, re.split("^# ", TEXT.strip(), flags=re.MULTILINE)[1:]))
CLAIMS = dict.fromkeys(
    claim for one in ANNOUNCEMENTS for each in one.sentences for claim in each.claims
)
"""The names of all claims of the announcements, in their order."""
