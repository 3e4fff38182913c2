"""PatchManager: the only way in which the product changes somebody else's code.

A `Patch` names a target and a wrapper in wrapt's one signature `(wrapped, instance, args, kwargs)`. `apply` checks
every target first (does it exist, does it take the parameters the wrapper was written for) and changes nothing when one
check fails: a framework that moved a function must stop the job before training, not corrupt it later.

Three things make patching a living framework hard, and are dealt with here:

- modules that ran `from x import f` before us hold `f` by value. One sweep over sys.modules rebinds every module and
  class attribute that *is* the replaced object, whatever its name and whoever put it there;
- other patchers wrap the same targets, before or after us. We wrap whatever is there; what makes a second `apply`
  harmless is a mark on the wrapped object (its type), found again below other people's wrappers;
- `revert` must be exact. Each change of an attribute is recorded and undone in reverse; where somebody has wrapped our
  wrapper meanwhile, it cannot be taken out and is switched off instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet

from mindio_tft_patch.errors import PatchError
from mindio_tft_patch.patch_targets import Change, Target, layers, resolve, sweep

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Patch:
    """One wrapped function.

    Attributes:
        point: adaptation point, 1 to 12 (docs: adaptation points).
        target: "package.module:function" or "package.module:Class.method".
        wrapper: called as (wrapped, instance, args, kwargs) in place of the target.
        why: one sentence for the table of patches.
        parameters: names of the target's leading parameters (self and cls left out) that the wrapper relies on.
        versions: PEP 440 specifier of the framework versions that need the patch; empty: all.
        mandatory: must have been called by the end of the first iteration.
        optional_target: the target may be missing; the patch is then left out.
    """

    point: int
    target: str
    wrapper: Wrapper
    why: str
    parameters: tuple[str, ...] | None = None
    versions: str = ""
    mandatory: bool = True
    optional_target: bool = False


@dataclass(frozen=True)
class PatchRow:
    """A line of the table of patches.

    Attributes:
        version_ok: the patch is meant for the framework's version.
        found: the target exists and has the expected parameters.
        applied: the wrapper is in place now (somebody else may have replaced it since).
        calls: how often it was called.
    """

    point: int
    target: str
    why: str
    version_ok: bool
    found: bool
    applied: bool
    calls: int


@dataclass
class _Record:
    """What is known about a patch in this process; shared by everyone who finds the mark."""

    patch: Patch
    version_ok: bool = True
    found: bool = False
    calls: int = 0
    active: bool = False


class _Patched(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped target. Its type is the mark by which a later `apply` recognises it."""

    def __init__(self, wrapped: Any, record: _Record) -> None:
        wrapper = record.patch.wrapper

        def counting(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not record.active:
                return wrapped(*args, **kwargs)
            record.calls += 1
            return wrapper(wrapped, instance, args, kwargs)

        super().__init__(wrapped, counting)
        self._self_record = record

    # Functions are pickled by name and copied by reference; wrapt refuses both for its proxies.
    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__wrapped__.__qualname__)

    def __copy__(self) -> _Patched:
        return self

    def __deepcopy__(self, memo: Any) -> _Patched:
        return self


class PatchManager:
    """Applies patches to one process and takes them out again."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._own: list[_Record] = []  # those that this manager put in place, not found there
        self._changes: list[Change] = []

    def apply(self, patches: Iterable[Patch], version: str) -> None:
        """Check all patches, then put them in place; patches that are in place already are left alone.

        Several patches of one target nest in the order given: the last is called first.

        Args:
            patches: what to apply.
            version: of the framework; selects patches by their `versions`.

        Raises:
            PatchError: targets that are missing or take other parameters than expected; nothing was changed.
        """
        problems: list[str] = []
        records: list[_Record] = []
        plan: dict[tuple[int, int], tuple[Target, list[_Record]]] = {}
        for patch in patches:
            record = _Record(patch, version_ok=serves(patch.versions, version))
            target = self._find(record, problems)
            if target is not None:
                mark = _marked(target.current, patch)
                if mark is None:
                    problems += _parameter_problems(patch, target.current)
                    record.found = True
                    # One object that is a target under two names is one target.
                    key = id(target.current), 0 if target.owned else id(target.holder)
                    plan.setdefault(key, (target, []))[1].append(record)
                else:
                    record = mark
            records.append(record)
        if problems:
            raise PatchError(
                f"{len(problems)} patch target(s) do not fit version {version}: {'; '.join(problems)}. "
                "Use a supported version of the framework, or remove what changed these functions."
            )
        changes = [self._install(target, new) for target, new in plan.values()]
        self._changes += changes + sweep([change for change in changes if change.owned])
        named = {_key(record.patch) for record in records}
        self._records = [record for record in self._records if _key(record.patch) not in named] + records

    def revert(self) -> None:
        """Put back exactly what was there. A wrapper that others have wrapped meanwhile is switched off instead."""
        for change in reversed(self._changes):
            change.undo()
        for record in self._own:
            record.active = False
        self._changes.clear()
        self._own.clear()

    def rows(self) -> list[PatchRow]:
        """The table of patches, in the order of their points."""
        return [
            PatchRow(
                record.patch.point,
                record.patch.target,
                record.patch.why,
                record.version_ok,
                record.found,
                self._in_place(record),
                record.calls,
            )
            for record in sorted(self._records, key=lambda record: record.patch.point)
        ]

    def unreached(self) -> list[Patch]:
        """Mandatory patches that were applied and never called."""
        return [r.patch for r in self._records if r.active and r.patch.mandatory and r.calls == 0]

    def _find(self, record: _Record, problems: list[str]) -> Target | None:
        """Resolve the target of a patch that this version needs."""
        if not record.version_ok:
            return None
        try:
            return resolve(record.patch.target)
        except PatchError as problem:
            if not record.patch.optional_target:
                problems.append(str(problem))
            return None

    def _install(self, target: Target, records: list[_Record]) -> Change:
        """Wrap one target with all its patches."""
        after = target.current
        for record in records:
            after = _Patched(after, record)
            record.active = True
        self._own += records
        setattr(target.holder, target.name, after)
        return Change(target.holder, target.name, target.current, after, target.owned)

    def _in_place(self, record: _Record) -> bool:
        if not record.active:
            return False
        try:
            current = resolve(record.patch.target).current
        except PatchError:
            return False
        return _marked(current, record.patch) is not None


def problems_of(patch: Patch) -> list[str]:
    """Why a patch could not be applied to what is installed; empty: it could. Changes nothing."""
    try:
        return _parameter_problems(patch, resolve(patch.target).current)
    except PatchError as problem:
        return [str(problem)]


def serves(versions: str, version: str) -> bool:
    """Whether a framework version is in a PEP 440 specifier; an empty one holds all."""
    return not versions or SpecifierSet(versions).contains(version, prereleases=True)


def _key(patch: Patch) -> tuple[Any, ...]:
    """What makes two patches the same one. Wrappers are often closures, made anew by each call of a factory."""
    wrapper = patch.wrapper
    name = getattr(wrapper, "__qualname__", type(wrapper).__qualname__)
    return patch.point, patch.target, patch.why, getattr(wrapper, "__module__", ""), name


def _marked(current: Any, patch: Patch) -> _Record | None:
    """The record of `patch` where it is in place below `current`."""
    for layer in layers(current):
        if type(layer) is _Patched:
            record: _Record = layer._self_record
            if record.active and _key(record.patch) == _key(patch):
                return record
    return None


def _parameter_problems(patch: Patch, current: Any) -> list[str]:
    """Compare the leading parameters with what the wrapper expects."""
    if patch.parameters is None:
        return []
    function = current.__func__ if isinstance(current, (staticmethod, classmethod)) else current
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as problem:
        return [f"{patch.target}: its parameters cannot be read ({problem})"]
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return []  # somebody's wrapper without functools.wraps: it hands everything on
    names = tuple(parameter.name for parameter in parameters)
    if names[:1] in (("self",), ("cls",)):
        names = names[1:]
    if names[: len(patch.parameters)] == patch.parameters:
        return []
    return [f"{patch.target}: expected parameters ({', '.join(patch.parameters)}, ...), found ({', '.join(names)})"]
