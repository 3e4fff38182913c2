"""The training script and its data: are the files there, and does the script import the plugin?"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.doctor.command import Launch
from mindio_tft_patch.adaptors.doctor.findings import Finding, error, ok, warning
from mindio_tft_patch.adaptors.doctor.import_elsewhere import why_it_may_act
from mindio_tft_patch.adaptors.doctor.plugin_import import PluginImport, find_import
from mindio_tft_patch.adaptors.unknown_words import STANDBY, meant_flag, misplaced, switches_nothing
from mindio_tft_patch.config import Config, flags_of

_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def judge_script(launch: Launch, *, protected: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Is there a script, and is it protected?

    Args:
        protected: the job asks for what only an import of the plugin does.
        environ: of the job.
    """
    if not launch.script:
        yield error("command", "The command names no training script.", "Add the script behind the launcher's options.")
        return
    if launch.module or launch.no_python:
        return
    path = Path(launch.script)
    if not path.is_file():
        yield error("command", f"There is no script {launch.script} here.", "Change its path, or the folder.")
        return
    if protected:
        found = find_import(path.read_text(errors="replace"))
        if found.absent:
            yield _without_import(launch, why_it_may_act(path, environ))
        else:
            yield from _judge_import(launch.script, found)


def _without_import(launch: Launch, elsewhere: str) -> Finding:
    """The script does not import the plugin. elsewhere: why another file may do it, in words."""
    change = f"Add `import mindio_tft_patch` as the first import of {launch.script}."
    refused = " and Megatron refuses the flags" if flags_of(launch.script_args) else ""
    if elsewhere:
        return warning(
            "command",
            f"{launch.script} does not import mindio_tft_patch. Unless a module that it imports does, nothing is "
            f"protected{refused}; that was not found out: {elsewhere}.",
            change,
        )
    return error(
        "command",
        f"{launch.script} does not import mindio_tft_patch, nor does a module that it imports: nothing is "
        f"protected{refused}.",
        change,
    )


def _judge_import(script: str, found: PluginImport) -> Iterator[Finding]:
    """Does the script import the plugin, and in time?"""
    change = f"Make `import mindio_tft_patch` the first import of {script}."
    line = found.line
    if found.broken:
        yield error("command", f"{script} is no Python script ({found.broken}).", "Correct it, or name another script.")
    elif line is None and found.inside is not None:
        yield warning(
            "command",
            f"{script} imports mindio_tft_patch inside of a function (line {found.inside}); whether that runs before "
            "training begins was not examined.",
            change,
        )
    elif found.training is not None:
        yield error(
            "command",
            f"{script} imports mindio_tft_patch on line {line}, too late: line {found.training} has trained by then, "
            "or Megatron has refused the flags.",
            change,
        )
    elif found.patcher is not None:
        yield error(
            "command",
            f"{script} imports {found.patcher.framework} on line {found.patcher.line}, before mindio_tft_patch on line "
            f"{line}: MindSpeed-LLM has patched Megatron by then, and the import refuses the job.",
            change,
        )
    elif found.framework is not None:
        yield warning(
            "command",
            f"{script} imports {found.framework.framework} on line {found.framework.line}, before mindio_tft_patch on "
            f"line {line}: names that modules hold are corrected, but what has put a function of Megatron away (a "
            "partial, a default argument) stays unprotected.",
            change,
        )


def judge_standby(launch: Launch, config: Config) -> Iterator[Finding]:
    """Does an option of ttprun stand among the script's words?"""
    problem = misplaced(launch.script_args, config)
    if problem is not None:
        yield error("command", problem.message, problem.change)


def judge_words(unknown: Sequence[str], known: Sequence[str], config: Config | None = None) -> Iterator[Finding]:
    """Words that Megatron's parser does not know.

    Args:
        config: of the job; `judge_standby` has spoken of what is misplaced in it.
    """
    told = {STANDBY} if config is not None and misplaced(unknown, config) is not None else set()
    for word in unknown:
        name = word.partition("=")[0]
        if not word.startswith("-") or name in told:
            continue
        ours = meant_flag(name)
        if ours:
            yield error("flags", f"{switches_nothing(name)}.", f"Write {ours}.")
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f"Did you mean {near[0]}? " if near else ""
        hint = "ttprun's option of that name stands before the script's name. " if name == STANDBY else hint
        yield warning(
            "flags",
            f"{name} is not an argument of Megatron.",
            f"{hint}Nothing to do if the script adds it itself; otherwise remove it.",
        )


def judge_data(arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Do the indexed datasets exist?"""
    prefixes = [word for name in _DATA for word in arguments.get(name) or () if not _is_weight(word)]
    if arguments.get("mock_data"):
        yield ok("data", "Mock data.")
        return
    missing = [f"{one}{end}" for one in prefixes for end in (".bin", ".idx") if not Path(f"{one}{end}").is_file()]
    for file in missing[:5]:
        yield error(
            "data",
            f"{file} is not there{f' ({len(missing)} files are missing)' if len(missing) > 1 else ''}.",
            "Change --data-path: it takes the prefix of a .bin and an .idx file, seen from the working directory.",
        )
    if prefixes and not missing:
        yield ok("data", f"{len(prefixes)} dataset(s) found.")
        yield from _judge_split(arguments)
    for name in ("data_args_path", "per_split_data_args_path"):
        listing = arguments.get(name)
        if listing and not Path(listing).is_file():
            yield error("data", f"{listing} is not there.", f"Change --{name.replace('_', '-')}.")


def _judge_split(arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Megatron waits for ever for the first sample of a part that has no document."""
    prefixes: Sequence[str] = arguments.get("data_path") or []
    split = arguments.get("split")
    if len(prefixes) != 1 or not split or not arguments.get("eval_iters"):
        return
    documents = _documents(Path(f"{prefixes[0]}.idx"))
    shares = [float(one) for one in str(split).split(",")]
    if documents is None or sum(shares) <= 0:
        return
    ends = [round(documents * sum(shares[: end + 1]) / sum(shares)) for end in range(len(shares))]
    for number, name in enumerate(("training", "validation", "test")[: len(shares)]):
        if shares[number] > 0 and ends[number] <= (ends[number - 1] if number else 0):
            yield error(
                "data",
                f"{prefixes[0]} has {documents} document(s): --split {split} leaves none for the {name} data, and "
                "Megatron then waits for ever in the set-up.",
                "Change --split, set --eval-iters 0, or cut the text into more documents.",
            )


def _documents(index: Path) -> int | None:
    """Documents of a Megatron indexed dataset, from the head of its .idx file; None when it is something else."""
    with index.open("rb") as file:
        head = file.read(34)
    if len(head) < 34 or head[:9] != b"MMIDIDX\x00\x00":
        return None
    _version, _code, _sequences, entries = struct.unpack("<QBQQ", head[9:])
    return int(entries) - 1


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
