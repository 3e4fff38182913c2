"""The web page and the picture of a drill."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from support.drill import FAULT, fired, lines, record, report, run

from mindio_tft_patch.launch.drill.findings import Report
from mindio_tft_patch.launch.drill.page import page
from mindio_tft_patch.launch.drill.picture import nice, stretches, timeline

ROOM = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drilled() -> Report:
    return report(
        f"{FAULT};rank=2,step=9,moment=forward,kind=exit",
        [fired(0, 999.0)],
        run(record(reason="<script>alert(1)</script>"), seen=lines(*range(1, 15))),
    )


def test_the_page_needs_nothing_from_elsewhere(drilled: Report) -> None:
    text = page(drilled)
    assert not re.search(r"(src|href)=", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_what_a_log_says_cannot_become_part_of_the_page(drilled: Report) -> None:
    text = page(drilled)
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_the_page_says_first_whether_all_is_well(drilled: Report) -> None:
    assert "Not everything went as documented." in page(drilled)
    good = report(FAULT, [fired(0, 999.0)], run(record()))
    assert "Every fault was dealt with as documented." in page(good)
    assert "1 was repaired while the job stayed up" in page(good)


def test_the_table_has_a_row_for_every_fault(drilled: Report) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", page(drilled).partition("<table>")[2], re.DOTALL)
    assert len(rows) == 3 and "not reached" in rows[2]


def test_the_picture_is_well_formed_and_marks_what_happened(drilled: Report) -> None:
    picture = ElementTree.fromstring(timeline(drilled))
    assert len(list(picture.iter(f"{ROOM}path"))) == 1
    titles = [title.text or "" for title in picture.iter(f"{ROOM}title")]
    assert f"{FAULT}" in titles and any(title.startswith("rebuild: 0.2") for title in titles)


def test_a_drill_without_recoveries_has_a_picture_too() -> None:
    ElementTree.fromstring(timeline(report(FAULT, [], run())))
    ElementTree.fromstring(timeline(report(FAULT, [])))


def test_a_recovery_is_drawn_from_its_fault_to_its_end(drilled: Report) -> None:
    parts = stretches([drilled.outcomes[0]], drilled.recoveries[0])
    assert [name for name, _ in parts[:3]] == ["noticing", "deciding", "stop"]
    assert sum(seconds for _, seconds in parts) == pytest.approx(1.0)


@pytest.mark.parametrize(("raw", "round_number"), [(0.07, 0.1), (0.1, 0.1), (0.11, 0.2), (3.0, 5.0), (6.0, 10.0)])
def test_axes_have_round_numbers(raw: float, round_number: float) -> None:
    assert nice(raw) == pytest.approx(round_number)
