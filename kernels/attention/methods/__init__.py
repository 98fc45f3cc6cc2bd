"""Methods that select blocks of keys: one file each, found by its name."""
