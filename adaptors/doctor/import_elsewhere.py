"""A script does not import the plugin: does a module that it imports? Reads files, imports and runs nothing of them."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from mindio_tft_patch.adaptors.doctor.plugin_import import FRAMEWORKS, PLUGIN, imported

# None of them knows the plugin, and some are large.
_NEVER = frozenset(sys.stdlib_module_names) | {"torch", "torch_npu", "numpy", "scipy", "transformers", "triton"}
_AT_EVERY_START = ("sitecustomize", "usercustomize")  # which Python itself imports
# Who uses the SDK's names is served without the import.
_SDK_NAME = re.compile(r"\bmindio_ttp\b")
_DYNAMIC = re.compile(r"\b(?:import_module|__import__|exec|execfile|run_path|run_module|load_module|exec_module)\s*\(")
_IMPORTS = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)
_ENTRIES_MAX = 20_000  # of the folders of one module


class _CannotTellError(Exception):
    """The reason."""


def why_it_may_act(script: Path, environ: Mapping[str, str]) -> str:
    """Why the plugin may be imported by other files than the script, in words; empty: it is not.

    Args:
        script: the training script, which is Python and does not import the plugin itself.
        environ: of the job; its PYTHONPATH counts.
    """
    try:
        _Search(script, environ).look()
    except _CannotTellError as reason:
        return str(reason)
    return ""


class _Search:
    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        self._script = script
        beside = [str(script.resolve().parent), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._path = [*beside, *sys.path]
        self._seen: set[str] = set(_NEVER)

    def look(self) -> None:
        text = self._script.read_text(errors="replace")
        if _DYNAMIC.search(text):
            raise _CannotTellError(f"{self._script} imports or runs other files in a way that cannot be followed here")
        self._must_not_use_sdk(self._script, text)
        found = {name for node in ast.walk(ast.parse(text)) for name in imported(node)}
        wanted = found - {"", PLUGIN}  # the latter for type checkers only
        missing = sorted(name for name in wanted - self._seen if self._found(name) is None)
        if missing:
            raise _CannotTellError(f"{missing[0]}, which it imports, was not found here")
        self._follow([*sorted(wanted), *_AT_EVERY_START])

    def _follow(self, names: list[str]) -> None:
        while names:
            name = names.pop()
            if name in self._seen:
                continue
            self._seen.add(name)
            spec = self._found(name)
            for file in _files(name, spec) if spec is not None else ():
                text = file.read_text(errors="replace")
                if PLUGIN in text:
                    raise _CannotTellError(f"{file}, of {name}, names it")
                if name in FRAMEWORKS:
                    continue
                self._must_not_use_sdk(file, text)
                if "site-packages" not in file.parts:
                    names += _IMPORTS.findall(text)

    def _must_not_use_sdk(self, file: Path, text: str) -> None:
        if _SDK_NAME.search(text):
            raise _CannotTellError(f"{file} names the SDK (mindio_ttp), which protects a job in another way")

    def _found(self, name: str) -> ModuleSpec | None:
        """Where Python would find the module; a top-level name is found without importing anything."""
        try:
            return PathFinder.find_spec(name, self._path) or importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None


def _files(name: str, spec: ModuleSpec) -> Iterator[Path]:
    """The Python files of a module."""
    folders = list(spec.submodule_search_locations or ())
    if not folders and spec.origin and spec.origin.endswith(".py"):
        yield Path(spec.origin)
    entries = 0
    for folder in folders:
        for where, below, files in os.walk(folder):
            entries += len(below) + len(files)
            if entries > _ENTRIES_MAX:
                raise _CannotTellError(f"the folder of {name}, which it imports, is too large to be read")
            yield from (Path(where, file) for file in files if file.endswith(".py"))
