"""Environment variables: out of range, misspelt, or with an effect that the command line does not show."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from mindio_tft_patch.adaptors.doctor.findings import Finding, ok, warning
from mindio_tft_patch.config import Config, read_config

AREA = "variables"
_PREFIXES = ("TTP_", "TFT_")
# Read elsewhere than by config: the tests and the Makefile.
_OTHERS = frozenset({"TFT_MATRIX", "TFT_MATRIX_SEED", "TFT_MATRIX_SIZE", "TFT_PARITY"})


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


def judge(config: Config | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables. config: None when the flags make no configuration."""
    known = known_variables()
    ours = sorted(name for name in known if name.startswith((*_PREFIXES, "HIGH_")) or name.endswith("_ADDR"))
    strange = False
    for name in sorted(environ):
        if name in known:
            continue
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        if not name.startswith(_PREFIXES) and not (near and near[0].startswith("HIGH_")):
            continue
        strange = True
        hint = f"Did you mean {near[0]}? " if near else ""
        yield warning(AREA, f"{name}={environ[name]} is not a variable of this product.", f"{hint}Unset or rename it.")
    for message in config.warnings if config else ():
        name = message.partition("=")[0].partition(":")[0]
        more = ", or add the flags, to have them in one place" if name == "HIGH_AVAILABILITY" else ""
        yield warning(AREA, message, f"Change or unset {name}{more}.")
        strange = True
    if not strange:
        yield ok(AREA, "All variables are known and in range.")
