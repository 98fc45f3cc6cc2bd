"""The operations that formats compete at, one a file."""
