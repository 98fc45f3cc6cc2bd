"""The survey of a GPU without published runs, from its fitness to a page, within a time budget."""
