"""The table of patches for the installed Megatron, as data: `mindio-tft patches` prints it.

Whether a patch *can* be applied is asked of the installed Megatron; whether it was *reached* only a job knows, which
writes that into its JSON log after the first iteration (install.Installation).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron import versions
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import PatchError, UnsupportedError
from mindio_tft_patch.patch_targets import resolve
from mindio_tft_patch.patching import Patch, PatchManager, problems_of, serves

POINTS = {
    1: "start",
    2: "report optimizer state",
    3: "replica data-parallel groups",
    4: "optimizer replica",
    5: "exception capture",
    6: "operator resource clean-up",
    7: "dying-gasp checkpoint",
    8: "rebuild of model and optimizer after a memory error",
    9: "node restart and communication rebuild",
    10: "online repair of parameters",
    11: "rollback",
    12: "graceful pause",
}

# Points that change nothing in Megatron, or not only: where the rest of their work is done.
ELSEWHERE = {
    6: "adaptors/device (stop, clean) and adaptors/megatron/clean.py",
    7: "adaptors/megatron/dump.py",
    8: "adaptors/megatron/rebuild.py",
    9: "adaptors/device/regroup.py, adaptors/device/unconnected.py and launch/respawn.py",
    10: "adaptors/megatron/repair.py",
    11: "adaptors/megatron/rollback.py, train_state.py and resume.py",
    12: "not in this release",
}


@dataclass(frozen=True)
class Row:
    """A patch and what the installed Megatron makes of it.

    Attributes:
        versions: PEP 440 specifier of the versions that need the patch; empty: all.
        needed: the installed version is one of them.
        found: the target exists. parameters_ok: it takes the parameters that the wrapper expects.
        optional: the target may be missing. mandatory: it must be reached by the end of the first iteration.
        problem: why it cannot be applied. applied: it could be put in place.
        calls: how often a job has called it by then; None: not known.
    """

    point: int
    target: str
    why: str
    versions: str
    needed: bool
    found: bool
    parameters_ok: bool
    optional: bool
    mandatory: bool
    problem: str = ""
    applied: bool = False
    calls: int | None = None

    @property
    def blocks(self) -> bool:
        """A job with the plugin would refuse to start because of this."""
        return self.needed and bool(self.problem) and (self.found or not self.optional)

    @property
    def hole(self) -> bool:
        """A job ran without what this patch is for."""
        return self.calls == 0 and self.mandatory and self.needed


@dataclass(frozen=True)
class PatchReport:
    """The table.

    Attributes:
        version, path: of megatron.core.
        unsupported: why this Megatron is not served; empty: it is.
        log: the file that the calls come from; empty: none.
    """

    version: str
    path: str
    rows: tuple[Row, ...]
    unsupported: str = ""
    log: str = ""

    @property
    def holds(self) -> bool:
        """Every patch that is needed can be applied, and was reached as far as that is known."""
        return not self.unsupported and not any(row.blocks or row.hole for row in self.rows)


def inspect_patches(config: Config) -> PatchReport:
    """Compare the table with the installed Megatron. Patches this process; it is not one that trains.

    Raises:
        UnsupportedError: there is no Megatron.
    """
    found = versions.find_megatron()
    unsupported = ""
    try:
        versions.check_supported(found)
    except UnsupportedError as problem:
        unsupported = str(problem)
    patches = sorted(_table(config, found), key=lambda patch: patch.point)
    rows = [row_of(patch, found.core) for patch in patches]
    if not any(row.blocks for row in rows):
        manager = PatchManager()
        manager.apply(patches, found.core)
        rows = [replace(row, applied=put.applied) for row, put in zip(rows, manager.rows(), strict=True)]
    return PatchReport(found.core, str(found.core_path), tuple(rows), unsupported)


def _table(config: Config, found: versions.MegatronVersion) -> list[Patch]:
    """Imports torch and Megatron, and MindSpeed-LLM where it is installed."""
    if found.is_tree_of_2023:
        from mindio_tft_patch.adaptors.megatron_legacy import patches as legacy
        from mindio_tft_patch.adaptors.megatron_legacy.session import LegacySession

        return legacy.table(LegacySession(config), lambda: None)
    from mindio_tft_patch.adaptors.mindspeed_llm import inspection

    if inspection.wanted(config):
        return inspection.inspected(config)
    from mindio_tft_patch.adaptors.megatron.patches import table
    from mindio_tft_patch.adaptors.megatron.session import Session

    return table(Session(config), lambda: None)


def row_of(patch: Patch, version: str) -> Row:
    """What an installed framework makes of one patch."""
    needed = serves(patch.versions, version)
    problems = problems_of(patch) if needed else []
    return Row(
        point=patch.point,
        target=patch.target,
        why=patch.why,
        versions=patch.versions,
        needed=needed,
        found=needed and _exists(patch.target),
        parameters_ok=needed and not problems,
        optional=patch.optional_target,
        mandatory=patch.mandatory,
        problem="; ".join(problems),
    )


def _exists(target: str) -> bool:
    try:
        resolve(target)
    except PatchError:
        return False
    return True


def with_calls(report: PatchReport, folder: Path) -> PatchReport:
    """Add what the newest job in a log folder says about its patches.

    Raises:
        FileNotFoundError: no file there has such a line.
    """
    for file in sorted(folder.glob("ttp_log.jsonl*"), key=lambda file: file.stat().st_mtime, reverse=True):
        written = last_patches(file)
        if written is not None:
            return replace(report, rows=tuple(_joined(report.rows, written)), log=str(file))
    raise FileNotFoundError(
        f"No ttp_log.jsonl* in {folder} tells which patches a job reached. The job writes it when its second iteration "
        "begins, into the folder TTP_LOG_PATH, unless TTP_LOG_LEVEL is above INFO or TTP_LOG_STDOUT is 1."
    )


def last_patches(file: Path) -> list[dict[str, Any]] | None:
    """The last list of patches in a JSON log; None without one."""
    found: list[dict[str, Any]] | None = None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"patches"' not in line:
                continue
            try:
                patches = json.loads(line).get("patches")
            except (ValueError, AttributeError):
                continue  # the line that a killed process was writing
            if isinstance(patches, list):
                found = patches
    return found


def _joined(rows: tuple[Row, ...], written: list[dict[str, Any]]) -> Iterator[Row]:
    """Several patches of a point may have the same target; both tables have them in the same order."""
    calls: dict[tuple[int, str], list[int]] = {}
    for entry in written:
        calls.setdefault((entry["point"], entry["target"]), []).append(entry["calls"])
    seen: Counter[tuple[int, str]] = Counter()
    for row in rows:
        key = row.point, row.target
        known, place = calls.get(key, []), seen[key]
        seen[key] += 1
        yield replace(row, calls=known[place] if place < len(known) else None)
