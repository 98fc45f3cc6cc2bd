"""Gated feed-forward layer with few active units, relu or relu2, on Hopper, by TwELL words.

    words = TwELL of X @ Wg.T            twell_gate.cu, which does not write G as a matrix
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu, in groups of eight tokens (_grouped.py)

256 units of a token share 31 entries, the published layout (formats/twell.py). A tile with more
entries is stored dense, so results are correct for any number of active units. Groups of tokens
with many active units go to a dense product (_remainder.py).
"""

from sparsebench.kernels.twell._grouped import WORDS

KERNEL = WORDS
