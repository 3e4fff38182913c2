"""Makes `mindio_ttp` importable where the original SDK is not installed.

    import mindio_ttp.framework_ttp as ttp      ->  functions of ours, by the table in adaptors/sdk/names.py

A finder at the end of sys.meta_path answers for `mindio_ttp` when nobody else has: an installed original wins. It is
put there by `import mindio_tft_patch`, and by a line in a .pth file of the wheel (PTH_LINE), so that programs which
import only `mindio_ttp` find it too. That line is run at the start of every interpreter of the environment; it imports
nothing.

    TFT_MINDIO_TTP=ours   our modules, also where the original is installed
    TFT_MINDIO_TTP=real   the original only

Importing an old name imports this package, but patches nothing: who calls the SDK's functions protects himself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OLD = "mindio_ttp"
SWITCH = "TFT_MINDIO_TTP"
_TABLE = "mindio_tft_patch.adaptors.sdk.names"
_MARK = "_mindio_tft_patch_old_names"  # of the class in PTH_LINE
_BY_OLD_NAME = "_mindio_tft_patch_by_old_name"  # of sys, when PTH_LINE imports this package


# What setup.py writes into mindio_tft_patch_old_names.pth; site runs lines that begin with "import", in a virtual
# environment twice. Compiling it is all that it costs, so it is short: no class statement, no function.
PTH_LINE = (
    "import os, sys; any(hasattr(one, '_mindio_tft_patch_old_names') for one in sys.meta_path) or sys.meta_path.insert("
    "0 if os.environ.get('TFT_MINDIO_TTP') == 'ours' else len(sys.meta_path), "
    "type('OldNames', (), {'_mindio_tft_patch_old_names': True, 'find_spec': staticmethod("
    "lambda name, path=None, target=None, sys=sys: None if name.partition('.')[0] != 'mindio_ttp' else "
    "vars(sys).setdefault('_mindio_tft_patch_by_old_name', True) and "
    "__import__('mindio_tft_patch.old_names', fromlist=['Finder']).Finder.find_spec(name, path, target))}))"
)


class Finder:  # no MetaPathFinder: importlib.invalidate_caches() would call that one's method on the class
    """Finds the modules of the table."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of an old name; None: it is none, or the original alone is wanted."""
        head, _, rest = fullname.partition(".")
        if head != OLD or os.environ.get(SWITCH) == "real":
            return None
        if rest and not (is_ours(sys.modules.get(OLD)) or _is_a_folder_only(sys.modules.get(OLD))):
            return None  # a part that the installed original lacks is not ours to add
        table: dict[str, dict[str, str]] = importlib.import_module(_TABLE).TABLE
        names = table.get(fullname)
        if names is None:
            return None
        package = any(other.startswith(f"{fullname}.") for other in table)
        # importlib.abc, which has the type of loaders, costs more to import than all of this file.
        return ModuleSpec(fullname, _Loader(names), is_package=package)  # type: ignore[arg-type]


class _Loader:
    """Makes a module whose attributes are looked up when they are first used."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        names = self._names

        def get(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            where, _, attribute = names[name].partition(":")
            value = getattr(importlib.import_module(where), attribute)
            setattr(module, name, value)
            return value

        module.__doc__ = f"{module.__name__} of the MindIO TFT SDK, as mindio_tft_patch offers it (docs/sdk.md)."
        vars(module).update(__getattr__=get, __dir__=lambda: sorted({*vars(module), *names}), __all__=list(names))


def install(environ: Mapping[str, str] | None = None) -> None:
    """Put the finder into sys.meta_path, unless it is there already."""
    environ = os.environ if environ is None else environ
    if any(finder is Finder or getattr(finder, _MARK, False) for finder in sys.meta_path):
        return
    place = 0 if environ.get(SWITCH) == "ours" else len(sys.meta_path)
    sys.meta_path.insert(place, Finder)


def uninstall() -> None:
    """Take the finder out again, and the modules that it has made; for tests."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not Finder and not hasattr(finder, _MARK)]
    for name in [name for name in sys.modules if name.partition(".")[0] == OLD and is_ours(sys.modules[name])]:
        del sys.modules[name]


def is_ours(module: ModuleType | None) -> bool:
    """Was this module made by us?"""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def _is_a_folder_only(module: ModuleType | None) -> bool:
    """A folder of that name without code in it, which Python takes for a package; an uninstall may have left it."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.origin is None and not is_ours(module)


def imported_by_old_name() -> bool:
    """Is this package being imported only because an old name was? To be asked once, by the import."""
    return bool(vars(sys).pop(_BY_OLD_NAME, False))


def warn_of_original(environ: Mapping[str, str]) -> None:
    """Say once, on the first rank, that an installed original answers to `mindio_ttp`, where we may be expected to."""
    if environ.get(SWITCH) in ("ours", "real") or environ.get("RANK", "0") != "0":
        return
    from importlib.util import find_spec

    spec = find_spec(OLD) if OLD not in sys.modules else getattr(sys.modules[OLD], "__spec__", None)
    if spec is not None and spec.origin is not None and not isinstance(spec.loader, _Loader):
        print(
            f"mindio_tft_patch: the original mindio_ttp is installed ({spec.origin}) and answers to its names. "
            f"Set {SWITCH}=ours to have this plugin answer, or {SWITCH}=real to hear no more of it.",
            file=sys.stderr,
            flush=True,
        )
