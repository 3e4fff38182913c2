"""docs/porting.md: every quotation of the tiny trainer is what stands in the file, and no public name is left out."""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from pathlib import Path

import pytest
from support.tiny_trainer import matrix

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests/support/tiny_trainer"
TEXT = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^<!-- (\S+) -->\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
METHODS = re.findall(r"^\| `(\w+)` \| (?:main|any|control) \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("file", "quotation"), QUOTED, ids=lambda value: value.strip().splitlines()[0].strip())
def test_a_quotation_stands_in_its_file(file: str, quotation: str) -> None:
    assert quotation in (ROOT / file).read_text(encoding="utf-8")


def test_every_block_of_python_is_a_quotation() -> None:
    assert len(QUOTED) == TEXT.count("```python") > 15


def _from_class_on(name: str) -> list[str]:
    lines = (TRAINER / name).read_text(encoding="utf-8").splitlines()
    return lines[lines.index("class Trainer:") :]


def test_the_change_to_the_trainer_is_the_difference_of_the_files() -> None:
    (shown,) = re.findall(r"^<!-- diff -->\n```diff\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    difference = list(difflib.unified_diff(_from_class_on("plain.py"), _from_class_on("train.py"), n=1, lineterm=""))
    assert shown.splitlines() == ["@@" if line.startswith("@@") else line for line in difference[2:]]


def _public() -> list[str]:
    tree = ast.parse((ROOT / "adaptors/porting/__init__.py").read_text(encoding="utf-8"))
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return list(ast.literal_eval(names))


def test_every_public_name_is_in_the_table_and_nothing_else() -> None:
    table = TEXT.split("## The parts")[1].split("## Limits")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(_public())


def test_every_method_of_the_contract_has_a_row() -> None:
    tree = ast.parse((ROOT / "mindio_tft_patch/processor/handlers.py").read_text(encoding="utf-8"))
    (contract,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Handlers"]
    assert [node.name for node in contract.body if isinstance(node, ast.FunctionDef)] == METHODS


def test_the_matrix_is_as_large_as_the_document_says() -> None:
    cases = [case for packed in matrix.JOBS for case, _ in packed.cases]
    sizes = [len({getattr(case, name) for case in cases}) for name in ("kind", "moment", "topology")]
    assert "{} kinds of fault at {} moments, in {} layouts".format(*sizes) in TEXT
    assert {case.rank for case in cases if case.topology == "dp4"} == set(range(matrix.RANKS))


def test_every_point_has_a_heading() -> None:
    numbers = [int(one) for row in re.findall(r"^### Points? (.*?):", TEXT, re.MULTILINE) for one in row.split(" and ")]
    assert numbers == list(range(1, 13))


def test_the_tiny_trainer_uses_megatron_core_alone_and_only_what_is_public() -> None:
    for path in TRAINER.glob("*.py"):
        if path.name in ("jobs.py", "matrix.py", "pausing.py"):  # of the tests
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert not [name for name in modules if name.startswith("megatron") and not name.startswith("megatron.core")]
        ours = {name for name in modules if name.startswith("mindio_tft_patch")}
        assert ours <= {"mindio_tft_patch", "mindio_tft_patch.adaptors.porting", "mindio_tft_patch.testing"}


def test_the_sentence_about_missing_work_is_one_that_the_check_says() -> None:
    contract = (ROOT / "mindio_tft_patch/contract.py").read_text(encoding="utf-8")
    assert "raises NotImplementedError" in contract and "is offered, which needs it" in textwrap.dedent(contract)
