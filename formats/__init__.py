"""Storage formats, one in each file: layout, conversion, inverse."""
