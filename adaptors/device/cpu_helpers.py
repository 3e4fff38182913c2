"""Megatron's dataset helpers (`helpers_cpp`), compiled into a cache where a Megatron-LM checkout lacks them.

Wheels ship the compiled module; a checkout expects `make` to write it next to the source, which needs GNU make,
a writable checkout and one rank at a time. Here a finder at the very end of `sys.meta_path` compiles the
checkout's own source into the user's cache instead, once for all ranks and jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("mindio_tft_patch")

_MODULE = "megatron.core.datasets.helpers_cpp"
_COMPILE_TIMEOUT_SECONDS = 300.0


class _HelpersFinder(importlib.abc.MetaPathFinder):
    """Finds `helpers_cpp` when nothing else did."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the compiled helpers, compiling them if need be."""
        if fullname != _MODULE:
            return None
        for folder in path or ():
            source = Path(folder) / "helpers.cpp"
            if source.is_file():
                library = compiled(source)
                loader = importlib.machinery.ExtensionFileLoader(fullname, str(library))
                return importlib.util.spec_from_file_location(fullname, library, loader=loader)
        return None


def install() -> None:
    """Put the finder at the end of `sys.meta_path`, once."""
    if not any(isinstance(finder, _HelpersFinder) for finder in sys.meta_path):
        sys.meta_path.append(_HelpersFinder())


def compiled(source: Path) -> Path:
    """Return the path of the compiled helpers, from the cache where possible."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    # The content names the folder, so two Megatron versions never share a library.
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = _cache_folder() / f"helpers_cpp-{digest}"
    library = folder / f"helpers_cpp{suffix}"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder / "lock"):
            if not library.is_file():
                _compile(source, library)
    return library


def _cache_folder() -> Path:
    """Return this user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "mindio_tft_patch"


def _compile(source: Path, library: Path) -> None:
    """Compile `source` to `library`; the library appears complete or not at all."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None or importlib.util.find_spec("pybind11") is None:
        raise ImportError(
            f"Megatron's dataset helpers ({source}) are not compiled, and compiling them needs a C++ compiler and "
            "pybind11. Install both (for example `apt-get install g++` and `pip install pybind11`)."
        )
    import pybind11

    unfinished = library.with_name(f".{library.name}.{os.getpid()}")
    includes = (sysconfig.get_path("include"), pybind11.get_include())
    command = [compiler, "-O3", "-shared", "-std=c++17", "-fPIC", *(f"-I{folder}" for folder in includes)]
    logger.info("compiling Megatron's dataset helpers into %s", library.parent)
    try:
        result = subprocess.run(
            [*command, str(source), "-o", str(unfinished)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMPILE_TIMEOUT_SECONDS,
        )
        if result.returncode != 0:
            raise ImportError(f"Megatron's dataset helpers ({source}) do not compile:\n{result.stderr[-2000:]}")
        os.replace(unfinished, library)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between the processes of this node."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
