"""The table of callbacks and the functions made from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from mindio_tft_patch.adaptors.sdk.callbacks import KINDS, Callback, Callbacks, Kind, register_functions


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_function_hands_on_its_arguments_by_name(kind: Kind) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []

    def register(name: str, arguments: Mapping[str, Any]) -> None:
        heard.append((name, dict(arguments)))

    function = register_functions(register)[kind.function]
    given = {name: object() for name, _ in kind.parameters}
    function(*given.values())
    function(**given)
    assert heard == [(kind.name, given)] * 2
    required = {name: given[name] for name, default in kind.parameters if default is inspect.Parameter.empty}
    function(**required)
    assert heard[2] == (kind.name, {**dict(kind.parameters), **required})
    with pytest.raises(TypeError):
        function()
    with pytest.raises(TypeError):
        function(*given.values(), "one too many")


def test_the_documentation_says_who_calls_a_callback_where_and_with_what() -> None:
    functions = register_functions(lambda name, arguments: None)
    text = functions["tft_register_clean_handler"].__doc__ or ""
    assert "function(is_uce_error, args, ctx)" in text
    assert "on the control thread" in text
    assert "0 (done), 1 (failed) or 2" in text
    assert "on a thread of its own" in (functions["tft_register_save_ckpt_handler"].__doc__ or "")


def test_the_latest_registration_counts() -> None:
    callbacks = Callbacks()
    callbacks.register("stop", print, "first")
    callbacks.register("stop", repr, "second")
    assert callbacks.get("stop") == Callback(repr, "second")
    assert callbacks.get("clean") is None


def test_what_is_missing_is_named_by_the_function_that_registers_it() -> None:
    callbacks = Callbacks()
    callbacks.register("stop", print)
    assert callbacks.missing("stop", "clean", "rollback") == [
        "tft_register_clean_handler",
        "tft_register_rollback_handler",
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "exception"], ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [None, 5, "text"])
def test_what_cannot_be_called_is_not_registered(kind: Kind, value: object) -> None:
    callbacks = Callbacks()
    with pytest.raises(TypeError, match=f"{kind.function}: .* must be callable"):
        callbacks.register(kind.name, value)
    assert callbacks.get(kind.name) is None
