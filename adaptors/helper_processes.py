"""Ends what this process has started with `multiprocessing`, when it leaves without the interpreter's own tear-down."""

from __future__ import annotations

import contextlib
import sys


def end_helper_processes() -> None:
    """Kill this process's living children of `multiprocessing`.

    Writers of checkpoints and the queues between them (`Manager`) are processes that nobody ends when their parent
    leaves by `os._exit`: they would wait for it for ever, with all that they have imported.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.kill()
