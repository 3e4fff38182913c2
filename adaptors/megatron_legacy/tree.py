"""Is the Megatron on the import path the one of 2023? Found out without importing it: it imports everything at once.

In that Megatron-LM `megatron/training.py` is a file; later releases have a package `megatron.training` and a
`megatron.core` that knows its version.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

# It has no version of its own; this one sorts below all releases of megatron-core.
VERSION = "0.0"
COMMIT = "285068c8108e0e8e6538f54fe27c3ee86c5217a2"


def find_tree() -> Path | None:
    """Return the folder `megatron` of the tree; None where another Megatron, or none, would be imported."""
    try:
        spec = importlib.util.find_spec("megatron")
    except ValueError:  # a module without a spec, that somebody has put into sys.modules
        return None
    if spec is None or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    return folder if is_tree(folder) else None


def is_tree(folder: Path) -> bool:
    """Return whether a folder `megatron` is laid out as in 2023."""
    old_training = (folder / "training.py").is_file() and not (folder / "training").is_dir()
    old_core = (folder / "core" / "parallel_state.py").is_file() and not (folder / "core" / "package_info.py").exists()
    return old_training and old_core
