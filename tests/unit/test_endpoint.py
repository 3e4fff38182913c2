"""Where a rank finds the controller, and what it says when there is none."""

from __future__ import annotations

import pytest

from mindio_tft_patch.errors import ControlError, ProtocolError
from mindio_tft_patch.protocol import endpoint


class Store:
    """A store that knows one value, or none."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def get(self, key: str) -> bytes:
        if self.value is None:
            raise RuntimeError(f"wait timeout after 60000ms, keys: {key}")
        return self.value.encode()


def test_without_a_controller_the_error_says_who_has_to_start_it() -> None:
    with pytest.raises(ControlError, match=r"cannot be found \(wait timeout.*tft_start_controller"):
        endpoint.fetch(Store(None))  # type: ignore[arg-type]


def test_what_is_no_endpoint_is_told_from_none() -> None:
    with pytest.raises(ProtocolError, match="no readable endpoint"):
        endpoint.fetch(Store("[]"))  # type: ignore[arg-type]
