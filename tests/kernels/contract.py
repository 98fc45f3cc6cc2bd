"""Return what a kernel refuses."""

from collections.abc import Callable

import pytest

from sparsebench.errors import Unsupported


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the Unsupported that a call raises."""
    with pytest.raises(Unsupported) as raised:
        call()
    return str(raised.value)
