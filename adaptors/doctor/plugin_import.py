"""Where a training script imports the plugin, and whether that is early enough. Reads the script, runs nothing of it.

What a late import does at run time:

- behind the call that trains: nothing. Megatron has refused the plugin's flags by then, or trained without protection;
- behind an import of Megatron: every module that holds one of the functions by name is corrected, but not what has put
  one away elsewhere (a partial, a default argument, a table);
- behind MindSpeed-LLM's patcher: the import refuses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PLUGIN = "mindio_tft_patch"
FRAMEWORKS = ("megatron", "mindspeed", "mindspeed_llm")
_REFUSED_BEHIND = "mindspeed_llm"
_TRAINS = "pretrain"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A line of the script; framework: the module that is imported there."""

    line: int
    framework: str


@dataclass(frozen=True)
class PluginImport:
    """What was found. Lines count from 1, and are in the order in which they are carried out.

    Attributes:
        line: of the first import of the plugin that runs with the script; None: there is none.
        inside: line of an import inside of a function, where there is no other.
        framework: first import of Megatron or MindSpeed before that. patcher: of MindSpeed-LLM before that.
        training: first line before that which trains.
        broken: why the script is no Python; empty: it is.
    """

    line: int | None = None
    inside: int | None = None
    framework: Place | None = None
    patcher: Place | None = None
    training: int | None = None
    broken: str = ""

    @property
    def absent(self) -> bool:
        """The script is Python, and imports the plugin nowhere."""
        return self.line is None and self.inside is None and not self.broken


def find_import(text: str) -> PluginImport:
    """Look for the import in the text of a script."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None)
        where = f"line {line}: " if line else ""
        return PluginImport(broken=f"{where}{getattr(problem, 'msg', problem)}")
    trainers = _functions_that_train(tree)
    framework = patcher = training = None
    for statement in _carried_out(tree.body):
        names = imported(statement)
        if PLUGIN in names:
            return PluginImport(statement.lineno, None, framework, patcher, training)
        for name in names:
            framework = framework or (Place(statement.lineno, name) if name in FRAMEWORKS else None)
            patcher = patcher or (Place(statement.lineno, name) if name == _REFUSED_BEHIND else None)
        if training is None and _calls(statement) & trainers:
            training = statement.lineno
    statements = [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and PLUGIN in imported(one)]
    within = [one.lineno for one in statements if not _is_type_checking(tree, one)]
    return PluginImport(inside=min(within, default=None), framework=framework, patcher=patcher, training=training)


def _carried_out(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements that run with the script, in their order; those of functions and classes do not count."""
    for statement in body:
        if isinstance(statement, (_Function, ast.ClassDef)):
            continue
        if isinstance(statement, ast.If) and _names_type_checking(statement.test):
            yield from _carried_out(statement.orelse)
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "handlers", "orelse", "finalbody")]
        if not any(blocks):
            yield statement
        for block in blocks:
            for part in block:
                yield from _carried_out(part.body if isinstance(part, ast.ExceptHandler) else [part])


def imported(node: ast.AST) -> set[str]:
    """Top-level packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {(node.module or "").partition(".")[0]}
    found = set()
    if isinstance(node, ast.stmt) and not isinstance(node, (_Function, ast.ClassDef)):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _name(call.func) in ("__import__", "import_module") and call.args:
                first = call.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value.partition(".")[0])
    return found


def _functions_that_train(tree: ast.Module) -> set[str]:
    """`pretrain`, and the functions of the script that call it, or one that does."""
    bodies = {node.name: _calls(node) for node in ast.walk(tree) if isinstance(node, _Function)}
    trainers = {_TRAINS}
    while found := {name for name, calls in bodies.items() if calls & trainers} - trainers:
        trainers |= found
    return trainers


def _calls(node: ast.AST) -> set[str]:
    return {_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}


def _name(function: ast.expr) -> str:
    """The last word of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _is_type_checking(tree: ast.Module, node: ast.AST) -> bool:
    """The node is in a block that only type checkers read."""
    blocks = [one for one in ast.walk(tree) if isinstance(one, ast.If) and _names_type_checking(one.test)]
    return any(node in list(ast.walk(inner)) for block in blocks for inner in block.body)
