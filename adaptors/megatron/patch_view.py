"""Prints the table of patches: with rich on a terminal, tab-separated elsewhere, or as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from mindio_tft_patch.adaptors.megatron.patch_report import ELSEWHERE, POINTS, PatchReport, Row

HEAD = ("point", "name", "target", "versions", "found", "parameters", "applied", "reached")


@contextlib.contextmanager
def quiet_import(environ: Mapping[str, str]) -> Iterator[None]:
    """Import Megatron without its remarks, from MEGATRON_LM_PATH where that is set, on a machine with no device too."""
    checkout = environ.get("MEGATRON_LM_PATH")
    if checkout:
        sys.path.insert(0, os.path.abspath(checkout))
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            from mindio_tft_patch.adaptors.device import cpu

            if not cpu.accelerator_present():
                cpu.install_cpu_stand_in()
            yield
        finally:
            logging.disable(logging.NOTSET)


def show(report: PatchReport, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps(_as_data(report), indent=2))
        return
    print(f"megatron-core {report.version} in {report.path}" + (f"; calls from {report.log}" if report.log else ""))
    lines = list(_lines(report))
    if sys.stdout.isatty():
        _rich(lines)
    else:
        print("\n".join("\t".join(line) for line in (HEAD, *lines)))
    for problem in _problems(report):
        print(f"error: {problem}")
    if report.holds:
        print("Every patch that this Megatron needs fits.")


def _as_data(report: PatchReport) -> dict[str, object]:
    rows = [{**asdict(row), "name": POINTS[row.point], "blocks": row.blocks} for row in report.rows]
    elsewhere = {str(point): {"name": POINTS[point], "where": where} for point, where in ELSEWHERE.items()}
    return {
        "megatron": report.version,
        "path": report.path,
        "unsupported": report.unsupported,
        "log": report.log,
        "holds": report.holds,
        "patches": rows,
        "without_patch": elsewhere,
    }


def _lines(report: PatchReport) -> Iterator[tuple[str, ...]]:
    for point, name in POINTS.items():
        for row in report.rows:
            if row.point == point:
                yield (str(point), name, row.target, row.versions or "all", *_cells(row))
        if point in ELSEWHERE:
            yield (str(point), name, f"({ELSEWHERE[point]})", "", "", "", "", "")


def _cells(row: Row) -> tuple[str, str, str, str]:
    if not row.needed:
        return "not needed", "", "", ""
    calls = "" if row.calls is None else f"{row.calls} call{'' if row.calls == 1 else 's'}"
    if row.calls == 0:
        calls = "NEVER" if row.mandatory else "no"
    found = "yes" if row.found else ("no (may be)" if row.optional else "MISSING")
    fits = "" if not row.found else ("yes" if row.parameters_ok else "WRONG")
    return found, fits, "yes" if row.applied else "no", calls


def _problems(report: PatchReport) -> Iterator[str]:
    if report.unsupported:
        yield report.unsupported
    for row in report.rows:
        if row.blocks:
            yield (
                f"{row.problem}. Without it: {row.why}. Use a supported Megatron (see `pip show megatron-core`, "
                "PYTHONPATH and MEGATRON_LM_PATH), or remove what changes this function."
            )
        if row.hole:
            yield f"{row.target} was never called in the job's first iteration. Without it: {row.why}."


def _rich(lines: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEAD, row_styles=("", "dim"))
    for line in lines:
        bad = any(word in line for word in ("MISSING", "WRONG", "NEVER"))
        table.add_row(*line, style="bold red" if bad else None)
    Console().print(table)
