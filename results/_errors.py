"""What this folder raises."""


class ResultError(ValueError):
    """A run on disk cannot be used; the message is one line: file, what was expected and found."""
