"""Pages of claims, their table, and their tables in the terminal."""
