"""Train small gated-ReLU language models with an L1 term, or with block-sparse weights."""
