"""The picture of the README tells what the code does."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from mindio_tft_patch.protocol.phases import PATHS, Strategy

PICTURE = Path(__file__).parents[2] / "docs" / "path-of-a-fault.svg"
WORDS = {"rollback": "roll back", "resume": "go on"}


def _texts() -> list[str]:
    root = ET.parse(PICTURE).getroot()
    return ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]


def test_repair_in_place_comes_first_with_all_its_phases_in_order() -> None:
    texts = _texts()
    names = [WORDS.get(phase.value, phase.value) for phase in PATHS[Strategy.RESPAWN]]
    assert [text for text in texts if text in names] == names
    title = next(place for place, text in enumerate(texts) if text.startswith("Repair in place"))
    rest = next(place for place, text in enumerate(texts) if text.startswith("What remains"))
    assert title < texts.index(names[0]) and texts.index(names[-1]) < rest


def test_the_rest_is_the_path_of_a_dump() -> None:
    (line,) = [text for text in _texts() if text.startswith("What remains")]
    path = [phase.value for phase in PATHS[Strategy.DUMP]]
    assert line.partition(": ")[2].split(" → ") == path[:-1] and path[-1] == "exit"


def test_every_colour_has_one_for_dark_mode() -> None:
    style = PICTURE.read_text(encoding="utf-8")
    light, _, dark = style.partition("prefers-color-scheme: dark")
    coloured = set(re.findall(r"\.(\w+) \{[^}]*#", light.partition("<style>")[2]))
    assert coloured and coloured == set(re.findall(r"\.(\w+) \{[^}]*#", dark.partition("</style>")[0]))
