"""Packages that MindSpeed-LLM imports and that these tests do not use: importable, and of no use.

Each name in them is a class that can be a base, an annotation or a default, and that says what is missing when it is
called. A package that is installed is found before this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Seen to be imported by `from mindspeed_llm import megatron_adaptor` and pretrain_gpt.py.
PACKAGES = frozenset({"torchair", "acl", "transformers", "tqdm", "datasets", "safetensors", "scipy"})


class _Missing(type):
    """The class of a name in a package that is not there."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torchair"):  # registers converters for the graph mode, as a decorator
            return lambda function: function
        raise ImportError(f"{cls.__module__}.{cls.__name__} is not installed in these tests")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})


class _AbsentPackage(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {"__module__": self.__name__})


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: for what nobody else has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the packages above and what is below them."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make the module."""
        return _AbsentPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def install() -> None:
    """Put the finder behind all others."""
    sys.meta_path.append(AbsentFinder())
