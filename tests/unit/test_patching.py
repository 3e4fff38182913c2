"""The patch manager, on small modules made up on the spot."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from mindio_tft_patch.errors import PatchError
from mindio_tft_patch.patching import Patch, PatchManager

SOURCE = """
def double(number, offset=0):
    return 2 * number + offset

class Base:
    def inherited(self, value):
        return ("base", value)

class Engine(Base):
    alias = staticmethod(double)

    def step(self, value):
        return ("step", value)

    also_step = step

    @staticmethod
    def static(value):
        return ("static", value)

    @classmethod
    def make(cls, value):
        return (cls.__name__, value)

engine = Engine()
"""


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    sys.modules[name] = made
    exec(source, made.__dict__)
    return made


@pytest.fixture
def lib() -> Iterator[Any]:
    before = set(sys.modules)
    yield module("patched_lib", SOURCE)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def tag(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "tagged", wrapped(*args, **kwargs)


def patch(name: str, wrapper: Callable[..., Any] = tag, **more: Any) -> Patch:
    return Patch(1, f"patched_lib:{name}", wrapper, "for the test", **more)


def applied(*patches: Patch, version: str = "1.0") -> PatchManager:
    manager = PatchManager()
    manager.apply(patches, version)
    return manager


def test_a_function_is_wrapped_and_calls_are_counted(lib: Any) -> None:
    manager = applied(patch("double", parameters=("number", "offset")))
    assert lib.double(4, offset=1) == ("tagged", 9)
    assert lib.double(1) == ("tagged", 2)
    (row,) = manager.rows()
    assert (row.found, row.applied, row.version_ok, row.calls) == (True, True, True, 2)


@pytest.mark.parametrize("name", ["step", "static", "make", "inherited"])
def test_every_kind_of_method_is_wrapped_and_comes_back_exactly(lib: Any, name: str) -> None:
    plain = getattr(lib.engine, name)(7)
    before = dict(vars(lib.Engine)), dict(vars(lib.Base))
    manager = applied(patch(f"Engine.{name}", parameters=("value",)))
    assert getattr(lib.engine, name)(7) == ("tagged", plain)
    manager.revert()
    assert (dict(vars(lib.Engine)), dict(vars(lib.Base))) == before
    assert getattr(lib.engine, name)(7) == plain


def test_the_wrapper_gets_the_instance(lib: Any) -> None:
    seen = []
    applied(patch("Engine.step", lambda wrapped, instance, args, kwargs: seen.append((instance, args))))
    lib.engine.step(3)
    assert seen == [(lib.engine, (3,))]


def test_a_subclass_can_be_patched_without_its_base(lib: Any) -> None:
    applied(patch("Engine.inherited"))
    assert lib.Base().inherited(1) == ("base", 1)


def test_modules_that_imported_by_value_are_rebound_under_any_name(lib: Any) -> None:
    user = module("patched_user", "from patched_lib import double, double as twice")
    original = lib.double
    manager = applied(patch("double"))
    assert user.double(1) == user.twice(1) == ("tagged", 2)
    assert lib.Engine.alias(1) == ("tagged", 2)
    manager.revert()
    assert user.double is user.twice is lib.double is lib.Engine.alias is original


def test_class_attributes_that_alias_a_method_are_rebound(lib: Any) -> None:
    manager = applied(patch("Engine.step"))
    assert lib.engine.also_step(1) == ("tagged", ("step", 1))
    manager.revert()
    assert lib.engine.also_step(1) == ("step", 1)


def test_applying_twice_wraps_once(lib: Any) -> None:
    manager = applied(patch("double"))
    manager.apply([patch("double")], "1.0")
    applied(patch("double"))  # another manager of the same process
    assert lib.double(1) == ("tagged", 2)
    assert len(manager.rows()) == 1
    assert manager.rows()[0].calls == 1


def test_patches_made_anew_by_a_factory_are_recognised(lib: Any) -> None:
    def factory() -> Patch:
        return patch("double", lambda wrapped, instance, args, kwargs: ("new", wrapped(*args, **kwargs)))

    manager = applied(factory())
    manager.apply([factory()], "1.0")
    assert lib.double(1) == ("new", 2)


def test_two_patches_of_one_target_nest_in_order(lib: Any) -> None:
    def outer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return "outer", wrapped(*args, **kwargs)

    original = lib.double
    manager = applied(patch("double"), patch("double", outer))
    assert lib.double(1) == ("outer", ("tagged", 2))
    assert [row.calls for row in manager.rows()] == [1, 1]
    manager.revert()
    assert lib.double is original


def test_two_names_of_one_object_are_one_target(lib: Any) -> None:
    module("patched_user", "from patched_lib import double as twice")
    manager = applied(patch("double"), Patch(2, "patched_user:twice", tag, "under another name"))
    assert lib.double(1) == sys.modules["patched_user"].twice(1) == ("tagged", ("tagged", 2))
    assert [row.applied for row in manager.rows()] == [True, True]


@pytest.mark.parametrize("polite", [True, False], ids=["with functools.wraps", "without functools.wraps"])
def test_another_patcher_before_us_is_kept_and_its_importers_are_rebound(lib: Any, polite: bool) -> None:
    theirs = other_patcher(lib.double, polite)
    lib.double = theirs
    user = module("patched_user", "from patched_lib import double as anything")
    manager = applied(patch("double", parameters=("number",)))
    assert lib.double(1) == user.anything(1) == ("tagged", ("theirs", 2))
    manager.revert()
    assert lib.double is user.anything is theirs


@pytest.mark.parametrize("polite", [True, False], ids=["with functools.wraps", "without functools.wraps"])
def test_another_patcher_after_us_neither_doubles_nor_loses_us(lib: Any, polite: bool) -> None:
    manager = applied(patch("double"))
    theirs = lib.double = other_patcher(lib.double, polite)
    manager.apply([patch("double")], "1.0")
    assert lib.double is theirs
    assert lib.double(1) == ("theirs", ("tagged", 2))
    assert manager.rows()[0].applied
    manager.revert()
    assert lib.double(1) == ("theirs", 2)
    manager.apply([patch("double")], "1.0")
    assert lib.double(1) == ("tagged", ("theirs", 2))


def test_a_patcher_that_throws_us_out_is_seen_and_answered(lib: Any) -> None:
    manager = applied(patch("double"))
    lib.double = lambda number: number
    assert not manager.rows()[0].applied
    manager.apply([patch("double")], "1.0")
    assert lib.double(5) == ("tagged", 5)


def other_patcher(function: Callable[..., Any], polite: bool) -> Callable[..., Any]:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return "theirs", function(*args, **kwargs)

    return functools.wraps(function)(theirs) if polite else theirs


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("patched_lib:missing", "patched_lib has no missing"),
        ("patched_lib:Engine.missing", "Engine has no missing"),
        ("patched_lib:Nowhere.step", "patched_lib has no Nowhere"),
        ("patched_nowhere:step", "cannot be imported"),
        ("patched_lib:engine", "not callable"),
    ],
)
def test_a_missing_target_is_refused_by_name(lib: Any, target: str, words: str) -> None:
    with pytest.raises(PatchError) as problem:
        applied(Patch(1, target, tag, "for the test"))
    assert target in str(problem.value)
    assert words in str(problem.value)


def test_other_parameters_are_refused_with_what_was_found(lib: Any) -> None:
    with pytest.raises(PatchError, match=r"Engine.step: expected parameters \(iteration, ...\), found \(value\)"):
        applied(patch("Engine.step", parameters=("iteration",)))


def test_one_bad_target_leaves_everything_as_it_was(lib: Any) -> None:
    original = lib.double
    with pytest.raises(PatchError, match="2 patch target"):
        applied(patch("double"), patch("missing"), patch("Engine.missing"))
    assert lib.double is original


def test_an_optional_target_may_be_missing(lib: Any) -> None:
    manager = applied(patch("missing", optional_target=True))
    (row,) = manager.rows()
    assert (row.found, row.applied) == (False, False)
    assert manager.unreached() == []


@pytest.mark.parametrize(
    ("versions", "version", "used"),
    [(">=0.17", "0.19.2", True), (">=0.17", "0.12.1", False), (">=0.17", "0.18.0rc1", True), ("", "any", True)],
)
def test_versions_select_patches(lib: Any, versions: str, version: str, used: bool) -> None:
    manager = applied(patch("double", versions=versions), version=version)
    assert [(row.version_ok, row.applied) for row in manager.rows()] == [(used, used)]
    assert (lib.double(1) == ("tagged", 2)) is used


def test_mandatory_patches_that_were_never_called_are_named(lib: Any) -> None:
    never = patch("double")
    manager = applied(never, patch("Engine.step"), patch("Engine.make", mandatory=False))
    lib.engine.step(1)
    assert manager.unreached() == [never]


def test_a_wrapped_function_looks_pickles_and_copies_like_the_original(lib: Any) -> None:
    signature = inspect.signature(lib.double)
    lib.double.__module__ = "patched_lib"
    applied(patch("double"))
    assert (lib.double.__name__, inspect.signature(lib.double)) == ("double", signature)
    assert pickle.loads(pickle.dumps(lib.double)) is lib.double
    assert copy.deepcopy({"hook": lib.double})["hook"] is lib.double


def test_an_exception_of_the_target_passes_through(lib: Any) -> None:
    applied(patch("double"))
    with pytest.raises(TypeError):
        lib.double()
