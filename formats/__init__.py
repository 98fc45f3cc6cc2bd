"""Storage formats: one per file, with its layout, the conversion and its inverse."""
