"""What Megatron reads out of its own source for the help texts of its flags, read once and ahead.

From 0.18 on each parser that it builds parses the source of some thirty classes: 0.1 s on a small machine, twice in the
set-up of a rank. The texts cannot change while a process lives, so a stand-by reads them while it waits.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable
from typing import Any


def read_ahead() -> None:
    """Keep the texts of this process, and read them now. Does nothing in a Megatron that does it in another way."""
    with contextlib.suppress(Exception):  # the rank itself meets whatever is wrong here, and says it
        from megatron.training import argument_utils, arguments

        factory = argument_utils.ArgumentGroupFactory
        name = "_get_field_docstrings"
        if list(inspect.signature(getattr(factory, name)).parameters) == ["self", "src_cfg_class"]:
            setattr(factory, name, keeping(getattr(factory, name)))
            arguments.add_megatron_arguments(argparse.ArgumentParser())


def keeping(read: Callable[[Any, type], dict[str, str]]) -> Callable[[Any, type], dict[str, str]]:
    """The method `read`, which reads each class once."""
    texts: dict[type, dict[str, str]] = {}

    def read_once(factory: Any, of: type) -> dict[str, str]:
        if of not in texts:
            texts[of] = read(factory, of)
        return dict(texts[of])

    return read_once
