"""The phases have the same names everywhere: enum, handler methods, files of the adaptor, documents, log."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.control import Job

from mindio_tft_patch.controller.events import Log
from mindio_tft_patch.processor.handlers import Handlers
from mindio_tft_patch.protocol.phases import PATHS, Phase, Strategy

ROOT = Path(__file__).parents[2]
ADAPTOR = ROOT / "adaptors/megatron"
PHASES = [phase.value for phase in Phase]
# exit is the guard's own, and needs no framework.
HANDLED = [name for name in PHASES if name != Phase.EXIT.value]
# Files that the adaptor has beside handlers.py; stop is done by the device.
WITH_A_FILE = ["clean", "rebuild", "repair", "rollback", "resume", "dump"]


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HANDLED)
def test_the_contract_has_a_method_for_every_phase(name: str) -> None:
    assert callable(getattr(Handlers, name, None))


def _methods(path: str, owner: str) -> list[str]:
    tree = ast.parse(_text(path))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    return [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", HANDLED)
def test_the_megatron_adaptor_has_a_method_for_every_phase(name: str) -> None:
    assert name in _methods("adaptors/megatron/handlers.py", "MegatronHandlers")


@pytest.mark.parametrize("name", WITH_A_FILE)
def test_a_phase_is_carried_out_in_the_file_of_its_name(name: str) -> None:
    assert f'"""Phase {name}: ' in (ADAPTOR / f"{name}.py").read_text(encoding="utf-8")


def test_a_file_that_says_it_is_a_phase_has_the_name_of_one() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in ADAPTOR.glob("*.py")}
    claims = {stem: match[1] for stem, text in files.items() if (match := re.match(r'"""Phase (\w+):', text))}
    assert set(claims.values()) <= set(PHASES)
    assert all(stem == name for stem, name in claims.items())


def test_the_document_has_a_heading_for_every_phase_in_order_and_no_other_small_one() -> None:
    headings = re.findall(r"^## (.*)$", _text("docs/how-it-works.md"), re.MULTILINE)
    assert [heading for heading in headings if heading[0].islower()] == PHASES


def test_the_paths_in_the_document_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| [^|]* \| ([\w, ]+) \| [^|]* \|$", _text("docs/how-it-works.md"), re.MULTILINE)
    documented = {name: path.split(", ") for name, path in rows if name in {strategy.value for strategy in PATHS}}
    assert documented == {strategy.value: [phase.value for phase in path] for strategy, path in PATHS.items()}


def test_the_document_of_the_log_names_every_phase() -> None:
    row = re.search(r"^\| `phase` \|.*$", _text("docs/operating.md"), re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[0])[1:] == PHASES


def test_the_field_of_the_log_holds_the_names_of_the_phases() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.dumps(0, 2, 3)
    logged = [line.fields["phase"] for line in job.outbox if isinstance(line, Log) and "phase" in line.fields]
    assert [name for name in dict.fromkeys(logged) if name] == [phase.value for phase in PATHS[Strategy.DUMP]]


def test_the_drawing_of_the_path_in_the_code_names_every_phase() -> None:
    drawing = ast.get_docstring(ast.parse(_text("mindio_tft_patch/protocol/phases.py"))) or ""
    assert set(PHASES) <= set(re.findall(r"\w+", drawing))
