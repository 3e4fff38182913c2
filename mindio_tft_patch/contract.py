"""What handlers must keep to, as far as it can be seen without carrying anything out.

Behind `mindio_tft_patch.testing.check_handlers`; rehearsal.py is the other half. Every sentence begins with the
adaptation point that it speaks of (docs/porting.md).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from mindio_tft_patch.processor.handlers import Handlers
from mindio_tft_patch.protocol.messages import CommitState, ReplicaSet
from mindio_tft_patch.protocol.phases import PATHS, Phase, Strategy

# Adaptation point of each method.
POINTS = {
    "commit_state": 2,
    "replica_sets": 3,
    "strategies": 5,
    "stop": 6,
    "arrived": 6,
    "clean": 6,
    "dump": 7,
    "rebuild": 9,
    "repair": 10,
    "rollback": 11,
    "resume": 11,
    "pause": 12,
}
_PHASES = [phase.value for phase in Phase if phase not in (Phase.STOP, Phase.EXIT)]  # those that take a plan


def lacks(handlers: Handlers, rank: int) -> list[str]:
    """What the handlers lack, each in a sentence; nothing is carried out."""
    found = [*_shapes(handlers)]
    known: dict[str, Any] = {}
    for name in ("replica_sets", "strategies", "commit_state"):
        if not any(sentence.startswith(_at(name)) for sentence in found):
            try:
                known[name] = getattr(handlers, name)()
            except Exception as error:
                found.append(says(name, f"raised {type(error).__name__}: {error}"))
    if "replica_sets" in known:
        malformed = [*_replica_sets(known["replica_sets"], rank)]
        found += malformed
        if malformed:
            del known["replica_sets"]
    if "strategies" in known:
        found += _strategies(handlers, known["strategies"], known.get("replica_sets"))
    if "commit_state" in known:
        found += _commit(handlers, known["commit_state"])
    return found


def _at(name: str) -> str:
    return f"point {POINTS[name]} ({name}): "


def says(name: str, words: str) -> str:
    """A sentence about a method."""
    return _at(name) + words


def _shapes(handlers: Handlers) -> Iterator[str]:
    for name in POINTS:
        method, arguments = getattr(handlers, name, None), ("plan",) if name in _PHASES else ()
        if not callable(method):
            yield says(name, f"there is no method {name}({', '.join(arguments)})")
            continue
        if inspect.iscoroutinefunction(method):
            yield says(name, "is a coroutine function, which nobody awaits")
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            yield says(name, "is a generator function (it has a yield): calling it does nothing")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            yield says(name, f"is called as {name}({', '.join(arguments)}), which it does not take: {error}")
        except ValueError:
            continue  # no signature is known, of a builtin say


def _replica_sets(sets: Any, rank: int) -> Iterator[str]:
    if not isinstance(sets, tuple) or not all(isinstance(one, ReplicaSet) for one in sets):
        yield says("replica_sets", f"must return a tuple of ReplicaSet, not {sets!r}")
        return
    if malformed := [problem for one in sets if (problem := _malformed(one))]:
        yield from (says("replica_sets", problem) for problem in malformed)
        return
    if not sets:
        yield says("replica_sets", "names no set: nothing of this rank could be saved or refilled")
    for one in sets:
        if list(one.ranks) != sorted(set(one.ranks)):
            yield says("replica_sets", f"{one.name}: ranks are not ascending, each once: {one.ranks}")
        if rank not in one.ranks:
            yield says("replica_sets", f"{one.name}: rank {rank} is not a member of its own replica set {one.ranks}")
    names = [one.name for one in sets]
    if len(set(names)) < len(names):
        yield says("replica_sets", f"two sets of this rank have the same name: {names}")


def _strategies(handlers: Handlers, offered: Any, sets: Any) -> Iterator[str]:
    if not isinstance(offered, tuple) or not all(isinstance(one, Strategy) for one in offered):
        yield says("strategies", f"must return a tuple of Strategy, not {offered!r}")
        return
    if not offered:
        yield says("strategies", "nothing is offered: every fault would end the job, and nothing would be saved")
    if Strategy.EXIT in offered:
        yield says("strategies", "exit needs nobody's offer; leave it out")
    alone = [one for one in sets or () if isinstance(one, ReplicaSet) and len(one.ranks) == 1]
    if alone and Strategy.RESPAWN in offered and Strategy.RELOAD not in offered:
        yield says(
            "replica_sets",
            f"nobody else holds the {alone[0].name} shard of rank {alone[0].ranks[0]}, so that respawn, which is "
            "offered, could never refill it",
        )
    for phase in Phase:
        needing = [one.value for one in offered if phase in PATHS[one]]
        why = _unimplemented(handlers, phase.value) if phase is not Phase.EXIT else ""
        if why and needing:
            yield says(
                phase.value,
                f"{why}, but {', '.join(needing)} is offered, which needs it: implement it, or leave that out of "
                "strategies()",
            )
        elif why and phase is Phase.PAUSE:
            yield says(phase.value, f"{why}: nobody could have the job hold still")


def _unimplemented(handlers: Handlers, name: str) -> str:
    """Why a method does not do anything, by its text; empty when it may, or when there is no text."""
    method = inspect.unwrap(getattr(handlers, name, None) or (lambda: None))
    function = getattr(method, "__func__", method)
    if function is getattr(Handlers, name):
        return "is only inherited from the contract, where it does nothing"
    body = _body_of(function)
    if body is None:
        return ""
    if len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0]):
        return "raises NotImplementedError"
    return "is empty" if all(isinstance(node, ast.Pass) for node in body) else ""


def _body_of(function: Any) -> list[ast.stmt] | None:
    """The statements of a function, without texts; None where they cannot be seen."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree.body[0], ast.FunctionDef):
        return None
    return [node for node in tree.body[0].body if not _is_text(node)]


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or an ellipsis."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _commit(handlers: Handlers, commit: Any) -> Iterator[str]:
    if not isinstance(commit, CommitState):
        yield says("commit_state", f"must return a CommitState, not {commit!r}")
        return
    if problem := _malformed(commit):
        yield says("commit_state", problem)
        return
    if commit.step < 0:
        yield says("commit_state", f"step {commit.step} is negative")
    for name, step in (("at_gate", commit.at_gate), ("updating", commit.updating)):
        if step is not None and step <= commit.step:
            yield says("commit_state", f"{name} is {step}, but step {commit.step} is complete already")
    if commit.at_gate is not None and commit.updating is not None:
        yield says("commit_state", "a rank is at the gate or behind it, not both at once")
    if (again := _asked_again(handlers)) != commit:
        yield says("commit_state", f"changes by being asked: it said {commit}, and then {again}")
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(_asked_again(handlers)))
    thread.start()
    thread.join()
    if elsewhere != [commit]:
        yield says("commit_state", f"does not say the same on another thread, {elsewhere[0]}; it is asked from any")


def _asked_again(handlers: Handlers) -> Any:
    try:
        return handlers.commit_state()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _malformed(value: CommitState | ReplicaSet) -> str:
    """Why the controller could not read it: a message goes to it, and Python checks no types; empty when it could."""
    try:
        received = msgspec.convert(msgspec.to_builtins(value), type(value))
    except (msgspec.ValidationError, TypeError) as error:
        return f"{value!r} cannot be sent to the controller: {error}"
    return "" if received == value else f"{value!r} comes to the controller as {received!r}: return that"
