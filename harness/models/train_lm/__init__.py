"""A small gated-ReLU language model: does training with an L1 term leave few hidden units on?"""
