"""Claims as pages: quote, conditions, bound, cells, verdict; and their table on a site."""
