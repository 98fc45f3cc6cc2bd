"""Prune weights to 2:4 beside a dense region, and replace layers of models by sparse ones."""
