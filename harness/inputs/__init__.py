"""The sources of operands: hashed bits, grids of blocks, files."""
