"""What this folder raises."""


class SuiteError(ValueError):
    """A suite, its data or a flag is not usable; one line: what, where, expected, found."""
