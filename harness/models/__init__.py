"""Networks made and measured around the kernels: pruned, trained on text, and whole."""
