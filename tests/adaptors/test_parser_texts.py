"""A stand-by reads the texts of Megatron's flags ahead: the parser is the same, and its source is read once."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mindio_tft_patch.adaptors.device import cpu
from mindio_tft_patch.adaptors.megatron import parser_texts


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    cpu.install_cpu_stand_in()
    yield
    cpu.uninstall_cpu_stand_in()


def test_the_parser_is_the_same_and_the_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    reads: list[type] = []
    original = factory._get_field_docstrings

    def counted(self: Any, src_cfg_class: type) -> dict[str, str]:
        reads.append(src_cfg_class)
        return original(self, src_cfg_class)

    before = arguments.add_megatron_arguments(argparse.ArgumentParser()).format_usage()
    monkeypatch.setattr(factory, "_get_field_docstrings", counted)
    parser_texts.read_ahead()
    assert reads and len(reads) == len(set(reads))
    number = len(reads)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    assert len(reads) == number
    assert parser.format_usage() == before


def test_what_a_caller_does_to_the_texts_stays_its_own() -> None:
    read = parser_texts.keeping(lambda factory, of: {"name": "text"})
    read(None, int)["name"] = "another"
    assert read(None, int) == {"name": "text"}


def test_another_megatron_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import argument_utils

    factory = argument_utils.ArgumentGroupFactory

    def other(self: Any) -> dict[str, str]:
        return {}

    monkeypatch.setattr(factory, "_get_field_docstrings", other)
    parser_texts.read_ahead()
    assert factory._get_field_docstrings is other
    monkeypatch.delattr(argument_utils, "ArgumentGroupFactory")
    parser_texts.read_ahead()
