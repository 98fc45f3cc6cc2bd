"""Storage formats, one a file: layout, converter, inverse."""
