"""Tensorboard gets every point once, although steps are computed or their ends repeated after a fault."""

from __future__ import annotations

from typing import Any


def write_points_once(writer: Any) -> None:
    """Let `add_scalar` of a tensorboard writer leave out steps that it has written already, for each name.

    A step that is computed again gives the same value, so the first one stays. writer: None where there is none.
    """
    if writer is None or getattr(writer, "_tft_points", None) is not None:
        return
    last: dict[str, Any] = {}
    add_scalar = writer.add_scalar

    def add_once(tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> None:
        if global_step is not None:
            if tag in last and global_step <= last[tag]:
                return
            last[tag] = global_step
        add_scalar(tag, scalar_value, global_step, *args, **kwargs)

    writer.add_scalar = add_once
    writer._tft_points = last
