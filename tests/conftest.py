"""What the header of a test run says."""

from __future__ import annotations

import os

from support.matrix import seed_and_size


def pytest_report_header() -> str:
    """How to repeat the sample of the fault matrix."""
    seed, size = seed_and_size(os.environ)
    chosen = "TFT_MATRIX=all" if size is None else f"TFT_MATRIX_SIZE={size}"
    return f"fault matrix: TFT_MATRIX_SEED={seed} {chosen}"
