"""A device that nobody has measured: from its fitness to a page, inside a budget of time."""
