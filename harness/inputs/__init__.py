"""What operands are made of: hashed bits, grids of blocks, files."""
