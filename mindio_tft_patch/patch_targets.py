"""Where a patch target lives: names to objects, layers of wrappers, and everyone who holds an object by value.

Knows nothing of patches; `patching` builds on it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindio_tft_patch.errors import PatchError

logger = logging.getLogger("mindio_tft_patch.patching")


@dataclass(frozen=True)
class Target:
    """A resolved target: `holder.name` is `current`. owned: the holder itself has the name, it is not inherited."""

    holder: Any
    name: str
    current: Any
    owned: bool


@dataclass(frozen=True)
class Change:
    """One attribute that was set: `holder.name` was `before` and became `after`."""

    holder: Any
    name: str
    before: Any
    after: Any
    owned: bool = True  # False: the name was inherited, so that undoing means deleting

    def undo(self) -> bool:
        """Put `before` back. False: somebody else has set the attribute since; it is theirs to remove."""
        if raw_attribute(self.holder, self.name)[0] is not self.after:
            return False
        if self.owned:
            setattr(self.holder, self.name, self.before)
        else:
            delattr(self.holder, self.name)
        return True


def resolve(target: str) -> Target:
    """Find `package.module:Class.method`.

    Raises:
        PatchError: names the target, and the part of it that is missing.
    """
    module_name, _, path = target.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
    except ImportError as problem:
        raise PatchError(f"{target}: the module cannot be imported ({problem})") from problem
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent, None)
        if holder is None:
            raise PatchError(f"{target}: {module_name} has no {parent}")
    current, owned = raw_attribute(holder, name)
    if current is None:
        raise PatchError(f"{target}: {getattr(holder, '__name__', holder)} has no {name}")
    if not callable(current) and not isinstance(current, (staticmethod, classmethod)):
        raise PatchError(f"{target}: is a {type(current).__name__}, which is not callable")
    return Target(holder, name, current, owned)


def raw_attribute(holder: Any, name: str) -> tuple[Any, bool]:
    """The object behind a name, descriptors unbound; and whether the holder itself has the name."""
    if name in vars(holder):
        return vars(holder)[name], True
    if isinstance(holder, type):
        for base in holder.__mro__[1:]:
            if name in vars(base):
                return vars(base)[name], False
        return None, False
    return getattr(holder, name, None), False


def layers(current: Any) -> Iterator[Any]:
    """`current` and everything that it wraps, by `__wrapped__` or, for wrappers without it, by closure."""
    waiting, seen = [current], set[int]()
    while waiting and len(seen) < 100:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if isinstance(layer, (staticmethod, classmethod)):
            waiting.append(layer.__func__)
        elif (inner := getattr(layer, "__wrapped__", None)) is not None:
            waiting.append(inner)
        else:
            waiting += [cell for cell in _cells(layer) if callable(cell)]


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that its function has not bound yet
            continue


def sweep(replaced: Sequence[Change]) -> list[Change]:
    """Rebind every module and class attribute that still is a replaced object."""
    new = {id(change.before): change for change in replaced}
    if not new:
        return []
    changes: list[Change] = []
    classes: dict[int, type] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                changes.append(_rebind(module, name, value, new[id(value)].after))
            elif issubclass(type(value), type):  # isinstance would ask lazy objects for their class
                classes[id(value)] = value
    for holder in classes.values():
        for name, value in list(vars(holder).items()):
            if id(value) in new:
                changes.append(_rebind(holder, name, value, new[id(value)].after))
            elif isinstance(value, (staticmethod, classmethod)) and id(value.__func__) in new:
                after = type(value)(new[id(value.__func__)].after)
                changes.append(_rebind(holder, name, value, after))
    return changes


def _rebind(holder: Any, name: str, before: Any, after: Any) -> Change:
    setattr(holder, name, after)
    logger.debug("rebound %s.%s", getattr(holder, "__name__", holder), name)
    return Change(holder, name, before, after)
