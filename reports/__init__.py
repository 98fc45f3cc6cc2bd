"""Show results: HTML reports, a static site, tables for the terminal, Markdown."""
