"""The tables that are computed from the rows of a run whenever it is read."""
