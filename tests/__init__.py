"""Tests of sparsebench; README.md describes the folders.

Tests run side by side, and sums are short: libraries and workers get one thread. NumPy reads that
when it is first imported, which conftest.py does through torch.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
