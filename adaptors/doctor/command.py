"""Takes a training command apart: what starts the ranks, how many, where, and with which script.

Two readers give the same `Launch`: `reading.py` asks torchrun's own parser (in a child process, because that needs
torch), and `read_leniently` here does without, where torchrun's parser cannot be asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

TTPRUN, TORCHRUN, PYTHON = "ttprun", "torchrun", "python"
_MODULES = {
    "mindio_tft_patch.launch.ttprun": TTPRUN,
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Options of torchrun that take no value; all others do.
_SWITCHES = frozenset({"standalone", "module", "m", "no-python", "run-path"})
_OPTIONAL_NUMBERS = frozenset({"standby"})  # ttprun's own; the number may be left out


@dataclass(frozen=True)
class Command:
    """A training command, before anybody has understood its options.

    Attributes:
        launcher: "ttprun", "torchrun" or "python"; empty when no word of the command is one that we know.
        words: everything behind the launcher.
        assignments: variables set in front of the command, as a shell would.
        before: words in front of the launcher (srun and its like), which are not looked at.
    """

    launcher: str
    words: tuple[str, ...] = ()
    assignments: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """What the launcher was told.

    Attributes:
        nodes: number of nodes; the smaller one of a range. nodes_max: the larger one.
        ranks_per_node: processes a node; 0: not known here ("gpu" on a machine without).
        node_rank: of this machine. master_address, master_port: where the ranks meet; port 0: a free one is taken.
        static: torchrun's static rendezvous, the only one whose address and port are known before the start.
        script: the training script, or its module. script_args: its arguments.
    """

    nodes: int = 1
    nodes_max: int = 1
    ranks_per_node: int = 1
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    static: bool = True
    max_restarts: int = 0
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    script: str = ""
    script_args: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0: not known."""
        return self.nodes * self.ranks_per_node


def read_command(words: Sequence[str]) -> Command:
    """Find the launcher."""
    words = list(words)
    assignments: dict[str, str] = {}
    while words and (words[0] == "env" or _ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            assignments[name] = value
    for position, word in enumerate(words):
        name, rest, before = PurePath(word).name, words[position + 1 :], tuple(words[:position])
        if name in (TTPRUN, TORCHRUN):
            return Command(name, tuple(rest), assignments, before)
        if re.fullmatch(r"python[0-9.]*", name):
            return _under_python(rest, assignments, before)
    return Command("", tuple(words), assignments)


def _under_python(words: list[str], assignments: Mapping[str, str], before: tuple[str, ...]) -> Command:
    while words and words[0].startswith("-") and words[0] != "-m":
        option = words.pop(0)
        if option in ("-W", "-X") and words:
            words.pop(0)
    launcher = _MODULES.get(words[1], "") if words[:1] == ["-m"] and len(words) > 1 else ""
    if not launcher and words and PurePath(words[0]).name in (TTPRUN, TORCHRUN):  # python /path/to/torchrun
        return Command(PurePath(words[0]).name, tuple(words[1:]), assignments, before)
    return Command(launcher or PYTHON, tuple(words[2:] if launcher else words), assignments, before)


def without_launcher(command: Command, environ: Mapping[str, str]) -> Launch:
    """A command that starts one rank; what else there is of the job stands in the environment."""
    words = list(command.words)
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    world, local = _number(environ.get("WORLD_SIZE"), 1), _number(environ.get("LOCAL_WORLD_SIZE"), 0)
    local = local or world
    nodes = max(1, -(-world // local))
    return Launch(
        nodes=nodes,
        nodes_max=nodes,
        ranks_per_node=local,
        node_rank=_number(environ.get("RANK"), 0) // local,
        master_address=environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_number(environ.get("MASTER_PORT"), 29500),
        module=module,
        script=words[0] if words else "",
        script_args=tuple(words[1:]),
    )


def read_leniently(words: Sequence[str]) -> Launch:
    """Read torchrun's options without torchrun; what cannot be read keeps its default."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).lstrip("-").replace("_", "-").partition("=")
        if not equals and rest and _takes(name, rest[0]):
            value = rest.pop(0)
        options[name] = value
    smallest, _, largest = options.get("nnodes", "1").partition(":")
    return launch_of(
        nodes=(_number(smallest, 1), _number(largest or smallest, 1)),
        ranks_per_node=_number(options.get("nproc-per-node", "1"), 0),
        node_rank=_number(options.get("node-rank", "0"), 0),
        master=(options.get("master-addr"), _number(options.get("master-port"), 0) or None),
        rendezvous=(options.get("rdzv-backend", "static"), options.get("rdzv-endpoint", "")),
        standalone="standalone" in options,
        max_restarts=_number(options.get("max-restarts"), 0),
        module="m" in options or "module" in options,
        no_python="no-python" in options,
        run_path="run-path" in options,
        script=rest[0] if rest else "",
        script_args=tuple(rest[1:]),
    )


def _takes(option: str, word: str) -> bool:
    """Is the word behind an option its value?"""
    return word.isdecimal() if option in _OPTIONAL_NUMBERS else option not in _SWITCHES


def launch_of(
    *,
    nodes: tuple[int, int],
    ranks_per_node: int,
    node_rank: int,
    master: tuple[str | None, int | None],
    rendezvous: tuple[str, str],
    standalone: bool,
    max_restarts: int,
    module: bool,
    no_python: bool,
    run_path: bool,
    script: str,
    script_args: tuple[str, ...],
) -> Launch:
    """A Launch from torchrun's options, by torchrun's rules for what stands for what.

    rendezvous: backend and endpoint. master: --master-addr and --master-port, which the endpoint overrides. A job of
    one node that is given neither takes a free port, as with --standalone.
    """
    backend, endpoint = rendezvous
    address, port = master[0] or "127.0.0.1", master[1] or 29500
    local = backend == "static" and not endpoint and master[1] is None and nodes[1] == 1
    if standalone or local:
        address, port = "127.0.0.1", 0
    elif endpoint:
        address, colon, text = endpoint.rpartition(":") if not endpoint.endswith("]") else (endpoint, "", "")
        address, port = (address if colon else endpoint).strip("[]"), _number(text, 29400)
    elif backend != "static":
        port = 0
    return Launch(
        nodes=nodes[0],
        nodes_max=nodes[1],
        ranks_per_node=ranks_per_node,
        node_rank=node_rank,
        master_address=address,
        master_port=port,
        static=backend == "static" and not standalone and not local,
        max_restarts=max_restarts,
        module=module,
        no_python=no_python,
        run_path=run_path,
        script=script,
        script_args=script_args,
    )


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() else default
