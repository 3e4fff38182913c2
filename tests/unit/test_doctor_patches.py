"""The table of patches as data, against a stand-in for a framework."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindio_tft_patch import patching
from mindio_tft_patch.adaptors.megatron.patch_report import POINTS, PatchReport, Row, last_patches, row_of, with_calls
from mindio_tft_patch.patching import Patch


def wrapper(wrapped: object, instance: object, args: object, kwargs: object) -> None: ...


def row(target: str = "json:dumps", **changed: object) -> Row:
    return row_of(Patch(4, target, wrapper, "why", **changed), "0.19.2")  # type: ignore[arg-type]


def test_a_target_that_fits() -> None:
    found = row(parameters=("obj",))
    assert (found.needed, found.found, found.parameters_ok, found.blocks) == (True, True, True, False)
    assert not isinstance(json.dumps, patching._Patched), "looking changes nothing"


def test_a_missing_target_blocks_unless_it_may_be_missing() -> None:
    assert row("json:no_such").blocks and not row("json:no_such").found
    assert not row("json:no_such", optional_target=True).blocks
    assert not row("json:no_such", versions="<0.17").needed
    assert not row("json:no_such", versions="<0.17").blocks


def test_other_parameters_block_even_where_the_target_may_be_missing() -> None:
    found = row(parameters=("text",), optional_target=True)
    assert found.found and not found.parameters_ok and found.blocks and "obj" in found.problem


def report(*rows: Row) -> PatchReport:
    return PatchReport("0.19.2", "/x", rows)


def write(file: Path, *lines: object) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_calls_come_from_the_last_line_of_the_log(tmp_path: Path) -> None:
    entry = {"point": 4, "target": "json:dumps", "calls": 0}
    write(tmp_path / "ttp_log.jsonl.1", {"patches": [entry]}, {"message": "x"}, {"patches": [{**entry, "calls": 3}]})
    found = with_calls(report(row()), tmp_path)
    assert found.rows[0].calls == 3 and found.holds
    assert found.log.endswith("ttp_log.jsonl.1")


def test_two_patches_of_one_target_keep_their_own_calls(tmp_path: Path) -> None:
    write(tmp_path / "ttp_log.jsonl", {"patches": [{"point": 4, "target": "json:dumps", "calls": n} for n in (1, 2)]})
    assert [one.calls for one in with_calls(report(row(), row(), row()), tmp_path).rows] == [1, 2, None]


def test_a_mandatory_patch_that_was_never_reached_is_a_hole(tmp_path: Path) -> None:
    write(tmp_path / "ttp_log.jsonl", {"patches": [{"point": 4, "target": "json:dumps", "calls": 0}]})
    assert not with_calls(report(row()), tmp_path).holds
    assert with_calls(report(row(mandatory=False)), tmp_path).holds


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "ttp_log.jsonl"
    file.write_text('{"patches": [{"poi')
    assert last_patches(file) is None
    with pytest.raises(FileNotFoundError, match="TTP_LOG_PATH"):
        with_calls(report(row()), tmp_path)


def test_the_twelve_points_have_names() -> None:
    assert list(POINTS) == list(range(1, 13))
