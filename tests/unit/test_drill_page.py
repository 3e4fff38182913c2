"""The web page and the picture of a drill."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import pytest
from support.drill import FAULT, fired, lines, record, report, run

from mindio_tft_patch.launch.drill.findings import Report
from mindio_tft_patch.launch.drill.page import page
from mindio_tft_patch.launch.drill.picture import nice, stretches, timeline
from mindio_tft_patch.launch.drill.view import COLUMNS, cells

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


def axes(made: Report) -> list[list[tuple[float, float]]]:
    """Labels and places of the ticks of both time axes: of the job, and of the enlarged recoveries."""
    texts = list(ElementTree.fromstring(timeline(made)).iter(f"{ROOM}text"))
    told = [
        (float((one.text or "").removesuffix(" s")), one)
        for one in texts
        if re.fullmatch(r"-?[\d.]+ s", one.text or "")
    ]
    ticks = [(value, float(one.get("x", "")), one.get("y", "")) for value, one in told if one.get("text-anchor")]
    heights = sorted({height for _, _, height in ticks}, key=float)
    return [[(value, x) for value, x, height in ticks if height == one] for one in heights]


def test_the_axis_of_the_job_counts_as_the_table_does(drilled: Report) -> None:
    (marker,) = ElementTree.fromstring(timeline(drilled)).iter(f"{ROOM}path")
    place = float(marker.get("d", "").split()[1])
    (one, at_one), *_, (other, at_other) = axes(drilled)[0]
    second = one + (place - at_one) * (other - one) / (at_other - at_one)
    assert cells(drilled, drilled.outcomes[0])[COLUMNS.index("at (s)")] == "99.0"
    assert second == pytest.approx(99.0, abs=0.05)


def test_an_enlarged_recovery_shows_the_seconds_of_the_table(drilled: Report) -> None:
    seconds = cells(drilled, drilled.outcomes[0])[COLUMNS.index("seconds")]
    assert f">{seconds} s</text>" in timeline(drilled)
    values = [value for value, _ in axes(drilled)[1]]
    assert 0.0 in values and min(values) < 0.0, "what came before the first report is to the left of zero"


def test_runs_outside_of_the_time_shown_have_no_bar() -> None:
    early, late = run(record(), seen=lines(1, 2, 3)), replace(run(code=1), began=2000.0, ended=2001.0)
    for rect in ElementTree.fromstring(timeline(report(FAULT, [fired(0, 999.0)], early, late))).iter(f"{ROOM}rect"):
        assert float(rect.get("width", "")) > 0


def test_the_page_has_the_whole_command_to_repeat_it(drilled: Report) -> None:
    made = replace(drilled, again=("cd /work", "mindio-tft drill --faults 'a;b' -- ttprun x.py"))
    assert f"<pre>cd /work\n{escape(made.again[1])}</pre>" in page(made)


@pytest.mark.parametrize(("raw", "round_number"), [(0.07, 0.1), (0.1, 0.1), (0.11, 0.2), (3.0, 5.0), (6.0, 10.0)])
def test_axes_have_round_numbers(raw: float, round_number: float) -> None:
    assert nice(raw) == pytest.approx(round_number)
