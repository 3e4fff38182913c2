"""Helpers that MindSpeed imports."""

from __future__ import annotations


def reset_thread_affinity() -> None:
    """Threads are not bound to cores here."""
