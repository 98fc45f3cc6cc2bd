"""The operations in which formats compete, one per file."""
