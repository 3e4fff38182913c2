"""Versions of the software below torch_npu."""

from __future__ import annotations


def get_cann_version() -> str:
    """There is no CANN; MindSpeed only compares the number."""
    return "8.3.RC1"
