"""Prints what the doctor found: with rich on a terminal, plain lines elsewhere, or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from mindio_tft_patch.adaptors.doctor.examine import Report
from mindio_tft_patch.adaptors.doctor.findings import Level

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def show(report: Report, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps(_as_data(report), indent=2))
    elif sys.stdout.isatty():
        _rich(report)
    else:
        _plain(report)


def summary(report: Report) -> str:
    """The last line."""
    if report.errors:
        return (
            f"{report.errors} error(s), {report.warnings} warning(s): change what is marked as error before the start."
        )
    return f"No errors, {report.warnings} warning(s)."


def _heading(report: Report) -> str:
    """What stands above the table of faults, or in its place."""
    if not report.errors:
        return "What a fault will lead to" if report.faults else "What a fault will lead to was not looked at"
    if report.faults:
        return "What a fault will lead to, once the errors are corrected; as it is, the job will not hold"
    return "What a fault will lead to is not known before the errors are corrected"


def _as_data(report: Report) -> dict[str, object]:
    return {
        "launcher": report.launcher,
        "launch": {**asdict(report.launch), "world_size": report.launch.world_size},
        "errors": report.errors,
        "warnings": report.warnings,
        "findings": [asdict(finding) for finding in report.findings],
        "faults": [{**asdict(fault), "saved": fault.saved} for fault in report.faults],
    }


def _plain(report: Report) -> None:
    for finding in report.findings:
        change = f" -> {finding.change}" if finding.change else ""
        print(f"{finding.level.value:<8}{finding.area}: {finding.message}{change}")
    if report.launcher:
        print(f"\n{_heading(report)}{':' if report.faults else '.'}")
    for fault in report.faults:
        print(f"  {fault.fault}: {fault.outcome} ({fault.why})")
    print(f"\n{summary(report)}")


def _rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table("", "area", "finding", "what to change", show_lines=True)
    for finding in report.findings:
        style = _STYLES[finding.level]
        table.add_row(Text(finding.level.value, style), Text(finding.area), Text(finding.message), Text(finding.change))
    console.print(table)
    if report.faults:
        faults = Table("fault", "what becomes of the job", "why", title=_heading(report), show_lines=True)
        for fault in report.faults:
            faults.add_row(
                Text(fault.fault), Text(fault.outcome, "green" if fault.saved else "yellow"), Text(fault.why)
            )
        console.print(faults)
    elif report.launcher:
        console.print(Text(f"{_heading(report)}."))
    console.print(Text(summary(report), "bold red" if report.errors else "bold green"))
