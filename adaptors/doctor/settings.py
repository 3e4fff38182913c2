"""Environment variables: out of range, misspelt, or with an effect that the command line does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindio_tft_patch.adaptors.doctor.findings import Finding, ok, warning
from mindio_tft_patch.config import Config
from mindio_tft_patch.variables import unknown_variables

AREA = "variables"


def judge(config: Config | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables. config: None when the flags make no configuration."""
    strange = False
    for name, near in unknown_variables(environ).items():
        strange = True
        hint = f"Did you mean {near}? " if near else ""
        yield warning(AREA, f"{name}={environ[name]} is not a variable of this product.", f"{hint}Unset or rename it.")
    for message in config.warnings if config else ():
        name = message.partition("=")[0].partition(":")[0]
        more = ", or add the flags, to have them in one place" if name == "HIGH_AVAILABILITY" else ""
        yield warning(AREA, message, f"Change or unset {name}{more}.")
        strange = True
    if not strange:
        yield ok(AREA, "All variables are known and in range.")
