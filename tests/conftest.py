"""What the header of a test run says, and which tests run only at night."""

from __future__ import annotations

import os

import pytest
from support import in_place_matrix, matrix


def pytest_report_header() -> str:
    """How to repeat the samples of the fault matrices."""
    seed, size = matrix.seed_and_size(os.environ)
    _, in_place = in_place_matrix.seed_and_size(os.environ)
    chosen = "TFT_MATRIX=all" if size is None else f"TFT_MATRIX_SIZE={size} TFT_IN_PLACE_SIZE={in_place}"
    return f"fault matrices: TFT_MATRIX_SEED={seed} {chosen}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` has half an hour; `make test-all` has the night."""
    if os.environ.get("TFT_MATRIX") == "all":
        return
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.skip(reason="runs with make test-all (TFT_MATRIX=all)"))
