"""Bad input is refused by a ValueError of one line that says what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(message: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> str:
    """Return the line of the ValueError that a call raises, in which the regular expression is found."""
    with pytest.raises(ValueError, match=message) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
