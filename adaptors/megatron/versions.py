"""Which Megatron is installed, found out without importing it.

Supported: megatron-core 0.12.x (Megatron-LM core_v0.12, from a checkout) and 0.17 up to 0.19.x (from PyPI); and the
Megatron-LM of 2023, which has no version (adaptors.megatron_legacy).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from mindio_tft_patch.adaptors.megatron_legacy.tree import VERSION, find_tree
from mindio_tft_patch.errors import UnsupportedError

SUPPORTED = (">=0.12,<0.13", ">=0.17,<0.20")
OLD = SUPPORTED[0]
NEW = SUPPORTED[1]


@dataclass(frozen=True)
class MegatronVersion:
    """The Megatron that an import would find.

    core: version of megatron.core. core_path: its folder. training_path: folder of megatron.training, None without it.
    """

    core: str
    core_path: Path
    training_path: Path | None

    @property
    def is_tree_of_2023(self) -> bool:
        """The Megatron-LM of 2023, which adaptors.megatron_legacy serves."""
        return self.core == VERSION

    def matches(self, versions: str) -> bool:
        """Return whether the version is in a PEP 440 specifier."""
        return SpecifierSet(versions).contains(self.core, prereleases=True)


def installed() -> MegatronVersion:
    """Find Megatron and refuse one that is not supported.

    Raises:
        UnsupportedError: names what was found and what is supported.
    """
    found = find_megatron()
    check_supported(found)
    return found


def find_megatron() -> MegatronVersion:
    """Find megatron.core and megatron.training on the import path.

    Raises:
        UnsupportedError: there is none, or its version cannot be told.
    """
    tree = find_tree()
    if tree is not None:  # looking for a module below it would import all of it
        return MegatronVersion(VERSION, tree / "core", tree)
    core = _folder("megatron.core")
    if core is None:
        raise UnsupportedError(
            "Megatron is not installed: there is no megatron.core on the import path.",
            change="Install megatron-core (pip install 'megatron-core>=0.17,<0.20'), or add a Megatron-LM checkout to "
            "PYTHONPATH.",
        )
    return MegatronVersion(version_in(core), core, _folder("megatron.training"))


def check_supported(found: MegatronVersion) -> None:
    """Refuse a Megatron whose functions we do not know.

    Raises:
        UnsupportedError: names what was found and what is supported.
    """
    if found.is_tree_of_2023:
        return  # whether it is the commit that we know shows when its functions are compared
    if not any(found.matches(versions) for versions in SUPPORTED):
        raise UnsupportedError(
            f"megatron-core {found.core} (in {found.core_path}) is not supported: its functions may have moved.",
            change=f"Use megatron-core {' or '.join(SUPPORTED)}.",
        )
    if found.training_path is None:
        raise UnsupportedError(
            f"megatron-core {found.core} (in {found.core_path}) comes without megatron.training, which holds the "
            "training loop.",
            change="Use megatron-core >=0.17 on Python >=3.12, or put a Megatron-LM checkout on PYTHONPATH.",
        )
    if found.training_path.parent != found.core_path.parent:
        raise UnsupportedError(
            f"megatron.core comes from {found.core_path} but megatron.training from {found.training_path}: two "
            "Megatrons are mixed.",
            change="Remove one of them from PYTHONPATH or from the environment.",
        )


def _folder(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def version_in(core: Path) -> str:
    """Read the version of a megatron.core folder from its source: importing it would import torch.

    Raises:
        UnsupportedError: the version is not where it should be.
    """
    text = (core / "package_info.py").read_text() if (core / "package_info.py").is_file() else ""
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise UnsupportedError(
            f"The version of megatron.core in {core} cannot be told: package_info.py is missing or has another form.",
            change=f"Use megatron-core {' or '.join(SUPPORTED)}.",
        )
    before = re.search(r"^PRE_RELEASE\s*=\s*['\"](.*?)['\"]", text, re.MULTILINE)
    return ".".join(part.group(1) for part in parts if part) + (before.group(1) if before else "")
