"""Environment variables that look like ours and are not: a misspelt name would be ignored in silence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from mindio_tft_patch.config import read_config

_PREFIXES = ("TTP_", "TFT_")
# What ttprun tells its ranks and stand-bys; users have no business with them.
OF_OUR_LAUNCHER = frozenset({"TFT_CONTROLLER", "TFT_RUN_FOLDER", "TFT_STANDBY"})
# Read elsewhere than by config: faults on purpose, the tests and the Makefile.
_OTHERS = OF_OUR_LAUNCHER | frozenset(
    {
        "TFT_BENCH_PEERS",
        "TFT_MATRIX",
        "TFT_MATRIX_SEED",
        "TFT_MATRIX_SIZE",
        "TFT_IN_PLACE_SIZE",
        "TFT_INJECT",
        "TFT_INJECT_STATE",
    }
)


class _Asked(dict[str, str]):
    """An empty environment that remembers which names it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        self.names.add(name)
        return default


def known_variables() -> frozenset[str]:
    """Every variable that the configuration reads; found by letting it read."""
    asked = _Asked()
    read_config([], asked)
    return frozenset(asked.names) | _OTHERS


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing reads, each with the name that may have been meant (or "")."""
    known = known_variables()
    ours = sorted(name for name in known if name.startswith((*_PREFIXES, "HIGH_")) or name.endswith("_ADDR"))
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name in known:
            continue
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        if name.startswith(_PREFIXES) or (near and near[0].startswith("HIGH_")):
            found[name] = near[0] if near else ""
    return found


def complaints(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each unknown variable."""
    return [
        f"{name}={environ[name]} is not a variable of this product" + (f"; did you mean {near}?" if near else ".")
        for name, near in unknown_variables(environ).items()
    ]
