"""What the CPU stand-in replaced, so that it can be put back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any

_MISSING = object()


class Registry:
    """Remembers each replaced attribute and environment variable with its former value."""

    def __init__(self) -> None:
        self.active = False
        self._attributes: list[tuple[Any, str, object]] = []
        self._environment: list[tuple[MutableMapping[str, str], str, str | None]] = []
        # id of the original -> (original, replacement); the original is kept alive so that its id stays its own.
        self._replacements: dict[int, tuple[object, object]] = {}

    def set(self, owner: Any, name: str, value: object) -> None:
        """Replace `owner.name` by `value`."""
        # vars(), not getattr: an inherited attribute must be deleted again, not copied down.
        original = vars(owner).get(name, _MISSING)
        self._attributes.append((owner, name, original))
        if original is not _MISSING and callable(original):
            self._replacements[id(original)] = (original, value)
        setattr(owner, name, value)

    def set_environment(self, environ: MutableMapping[str, str], name: str, value: str) -> None:
        """Set an environment variable until `revert`."""
        self._environment.append((environ, name, environ.get(name)))
        environ[name] = value

    def rebind_importers(self, modules: Mapping[str, ModuleType], *, prefix: str) -> None:
        """Rebind the names that modules below `prefix` imported by value (`from torch.cuda import ...`)."""
        for module_name, module in list(modules.items()):
            if module_name != prefix and not module_name.startswith(prefix + "."):
                continue
            for name, value in list(vars(module).items()):
                found = self._replacements.get(id(value))
                if found is not None and found[0] is value:
                    self._attributes.append((module, name, value))
                    setattr(module, name, found[1])

    def revert(self) -> None:
        """Undo every replacement, newest first."""
        for owner, name, original in reversed(self._attributes):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        for environ, variable, former in reversed(self._environment):
            if former is None:
                environ.pop(variable, None)
            else:
                environ[variable] = former
        self._attributes.clear()
        self._environment.clear()
        self._replacements.clear()
        self.active = False
