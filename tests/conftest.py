"""What the header of a test run says."""

from __future__ import annotations

import os

from support import in_place_matrix, matrix


def pytest_report_header() -> str:
    """How to repeat the samples of the fault matrices."""
    seed, size = matrix.seed_and_size(os.environ)
    _, in_place = in_place_matrix.seed_and_size(os.environ)
    chosen = "TFT_MATRIX=all" if size is None else f"TFT_MATRIX_SIZE={size} TFT_IN_PLACE_SIZE={in_place}"
    return f"fault matrices: TFT_MATRIX_SEED={seed} {chosen}"
