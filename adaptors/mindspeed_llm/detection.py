"""Whether this process trains with MindSpeed-LLM, found out without importing it.

Its package can be installed where somebody trains with plain Megatron. What tells the two apart is whether the script
imports MindSpeed-LLM's patcher before it imports Megatron's training loop; so both are waited for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

# Runs MindSpeed's patcher in its last line; `mindspeed_llm.megatron_adaptor` is another name for it.
PATCHER = "mindspeed_llm.tasks.megatron_adaptor_v2"
# What plain Megatron's scripts import; MindSpeed's patcher imports it as well.
LOOP = "megatron.training"


def beside_megatron() -> bool:
    """Return whether MindSpeed-LLM is on the import path."""
    if patched_already():
        return True
    try:
        return importlib.util.find_spec("mindspeed_llm") is not None
    except ValueError:  # a module without a spec, that somebody has put into sys.modules
        return False


def patched_already() -> bool:
    """Return whether MindSpeed's patcher has run, or runs."""
    return PATCHER in sys.modules


def when_ready(
    patched: Callable[[], None], plain: Callable[[], None], *, patcher: str = PATCHER, loop: str = LOOP
) -> None:
    """Call one of the two, once, as soon as Megatron is what it is going to be.

    Args:
        patched: MindSpeed's patcher has done its work.
        plain: Megatron's training loop was imported, and nobody has asked for MindSpeed's patcher.
        patcher, loop: their modules.
    """
    once = _Once()
    _after(patcher, lambda: once.call(patched))
    _after(loop, lambda: None if patcher in sys.modules else once.call(plain))


def before_patching(module: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with a module of MindSpeed's patcher as soon as it is imported, and before it is used."""
    wrapt.register_post_import_hook(act, module)


def _after(module: str, act: Callable[[], Any]) -> None:
    wrapt.register_post_import_hook(lambda _module: act(), module)


class _Once:
    def __init__(self) -> None:
        self._called = False

    def call(self, act: Callable[[], None]) -> None:
        if not self._called:
            self._called = True
            act()
