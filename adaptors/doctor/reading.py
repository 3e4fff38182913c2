"""The child process of the doctor: asks torchrun's and Megatron's own parsers what they make of a command.

Runs as `python -m mindio_tft_patch.adaptors.doctor.reading`: a JSON question on standard input, a JSON answer on
standard output. A process of its own, because Megatron reads WORLD_SIZE while it parses, prints while it validates,
ends the process when it does not like an option, and needs the CPU stand-in where there is no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mindio_tft_patch.adaptors.doctor.command import (
    PYTHON,
    TTPRUN,
    Command,
    Launch,
    launch_of,
    read_leniently,
    without_launcher,
)
from mindio_tft_patch.adaptors.unknown_words import STANDBY

# The switches are handed over by the command line and by the parent; here they would patch Megatron.
_NOT_FOR_THE_CHILD = ("HIGH_AVAILABILITY", "RANK", "WORLD_SIZE", "LOCAL_RANK")
ASK_SECONDS = 300.0


@dataclass
class Reading:
    """What the child found out.

    Attributes:
        launch: what the launcher was told.
        launch_trouble: what is wrong with the launcher's options; empty: nothing.
        launch_refused: its parser refuses them, so that `launch` is a guess.
        arguments: Megatron's arguments after its validation, plain values only; empty when they could not be read.
        unknown: words that Megatron's parser does not know; the script may.
        refusal: why Megatron's own parser or validation refuses the arguments.
        trouble: why Megatron could not be asked at all.
        megatron, megatron_path: version and folder of the Megatron that the job would import.
        unsupported: why this Megatron is not served.
        patches: why patches cannot be applied to it.
        torch: version. accelerator: a CUDA or NPU device is present here.
        lacks_einops: the installed Megatron would miss einops.
    """

    launch: Launch = field(default_factory=Launch)
    launch_trouble: str = ""
    launch_refused: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    refusal: str = ""
    trouble: str = ""
    megatron: str = ""
    megatron_path: str = ""
    unsupported: str = ""
    patches: list[str] = field(default_factory=list)
    torch: str = ""
    accelerator: bool = False
    lacks_einops: bool = False


def ask(command: Command, environ: Mapping[str, str], timeout_seconds: float = ASK_SECONDS) -> Reading:
    """Let a child process read the command; where it cannot, read what can be read without it."""
    question = {"launcher": command.launcher, "words": list(command.words), "environ": dict(environ)}
    child_environ = {name: value for name, value in environ.items() if name not in _NOT_FOR_THE_CHILD}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mindio_tft_patch.adaptors.doctor.reading"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=child_environ,
            check=False,
        )
        return _reading(json.loads(done.stdout.rpartition("\n")[2]))
    except subprocess.TimeoutExpired:
        trouble = f"importing Megatron took longer than {timeout_seconds:g} s"
    except (ValueError, KeyError, TypeError):
        trouble = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Reading(launch=_lenient(command, environ), trouble=trouble)


def _lenient(command: Command, environ: Mapping[str, str]) -> Launch:
    if command.launcher == PYTHON:
        return without_launcher(command, environ)
    return read_leniently(command.words)


def _reading(answer: dict[str, Any]) -> Reading:
    launch = answer.pop("launch")
    return Reading(launch=Launch(**{**launch, "script_args": tuple(launch["script_args"])}), **answer)


# ---------------------------------------------------------------------- in the child


def answer(question: Mapping[str, Any]) -> Reading:
    """Read the command of a question."""
    command = Command(question["launcher"], tuple(question["words"]))
    reading = Reading()
    if command.launcher == PYTHON:
        reading.launch = without_launcher(command, question["environ"])
    else:
        _ask_torchrun(command, reading)
    # As Python does for the job: the folder of the script comes first, and may hold a Megatron of its own.
    launch = reading.launch
    sys.path.insert(0, os.getcwd() if launch.module else os.path.dirname(os.path.abspath(launch.script)))
    try:
        _ask_megatron(reading)
    except Exception as problem:
        reading.trouble = reading.trouble or f"{type(problem).__name__}: {problem}".splitlines()[0]
    return reading


def _ask_torchrun(command: Command, reading: Reading) -> None:
    try:
        from torch.distributed import run

        from mindio_tft_patch.adaptors.ttprun_options import parse_ttprun
    except ImportError as problem:
        reading.launch, reading.launch_trouble = read_leniently(command.words), f"torch cannot be imported ({problem})"
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse = (lambda words: parse_ttprun(words)[0]) if command.launcher == TTPRUN else run.parse_args
            options = parse(list(command.words))
            nodes = run.parse_min_max_nnodes(options.nnodes)
    except (SystemExit, RuntimeError, ValueError) as problem:
        words = "".join((said.getvalue().strip() or str(problem)).splitlines()[-1:])
        words = (words.partition("error: ")[2] or words).removesuffix(".")
        reading.launch, reading.launch_refused = read_leniently(command.words), True
        reading.launch_trouble = words + _meant(words, [STANDBY, *_options_of(run.get_args_parser())])
        return
    try:
        ranks = int(run.determine_local_world_size(options.nproc_per_node))
    except ValueError as problem:
        ranks = 0
        reading.launch_trouble = f"--nproc-per-node {options.nproc_per_node}: {problem}".removesuffix(".")
    reading.launch = launch_of(
        nodes=nodes,
        ranks_per_node=ranks,
        node_rank=int(options.node_rank or 0),
        master=(options.master_addr, options.master_port),
        rendezvous=(options.rdzv_backend, options.rdzv_endpoint),
        standalone=bool(options.standalone),
        max_restarts=int(options.max_restarts or 0),
        module=bool(options.module),
        no_python=bool(options.no_python),
        run_path=bool(options.run_path),
        script=options.training_script,
        script_args=tuple(options.training_script_args),
    )


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"--[a-z][a-z_-]+", parser.format_usage())


def _meant(complaint: str, known: Sequence[str]) -> str:
    """The options that were meant by those that torchrun does not recognize."""
    unknown = [word.partition("=")[0] for word in complaint.split() if word.startswith("-")]
    near = [difflib.get_close_matches(word, known, n=1) for word in unknown if word not in known]
    named = ", ".join(match for matches in near for match in matches)
    return f"; did you mean {named}?" if named else ""


def _ask_megatron(reading: Reading) -> None:
    import torch

    from mindio_tft_patch.adaptors.device import cpu
    from mindio_tft_patch.adaptors.megatron import versions
    from mindio_tft_patch.errors import UnsupportedError

    reading.torch = str(torch.__version__)
    # TFT_DEVICE=cpu has the stand-in in place already, which the import of the plugin does.
    reading.accelerator = cpu.accelerator_present()
    if os.environ.get("TFT_ADAPTOR") == "own":  # the trainer is not Megatron's
        return
    try:
        found = versions.find_megatron()
        reading.megatron, reading.megatron_path = found.core, str(found.core_path)
        versions.check_supported(found)
    except UnsupportedError as problem:
        reading.unsupported = str(problem)
        if not reading.megatron:
            reading.trouble = "Megatron is not installed"
            return
    reading.lacks_einops = found.matches(versions.NEW) and importlib.util.find_spec("einops") is None
    if not reading.accelerator:
        cpu.install_cpu_stand_in()
    os.environ.update(_variables_of_rank_0(reading.launch))
    _parse(reading)
    _try_patches(reading)


def _variables_of_rank_0(launch: Launch) -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(max(1, launch.world_size)),
        "LOCAL_WORLD_SIZE": str(max(1, launch.ranks_per_node)),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
    }


def _parse(reading: Reading) -> None:
    from megatron.training import arguments as theirs

    from mindio_tft_patch.adaptors.megatron.arguments import with_flags

    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return parser

    words = list(reading.launch.script_args)
    sys.argv = [reading.launch.script, *words]
    said = io.StringIO()
    parsed: argparse.Namespace | None = None
    try:
        with contextlib.redirect_stderr(said):
            parsed = theirs.parse_args(with_flags(keep), ignore_unknown_args=True)
        reading.unknown = list(parsers[0].parse_known_args(words)[1])
        if reading.launch.world_size:
            theirs.validate_args(parsed, {})
    except SystemExit:
        reading.refusal = said.getvalue().strip().rpartition("error: ")[2]
    except Exception as problem:
        reading.refusal = _in_words(problem)
    if parsed is not None:
        reading.arguments = {name: value for name, value in vars(parsed).items() if _plain(value)}
        form = getattr(parsed, "params_dtype", None)
        reading.arguments["params_bytes"] = getattr(form, "itemsize", 4)


def _in_words(problem: Exception) -> str:
    """Megatron's assertions often have no message; the asserted line says more than nothing."""
    text = str(problem).strip().splitlines()
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return text[0] if text else f"`{(frame.line or '').strip()}` does not hold ({os.path.basename(frame.filename)})"


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _try_patches(reading: Reading) -> None:
    from mindio_tft_patch.adaptors.megatron import patch_report
    from mindio_tft_patch.config import Config

    report = patch_report.inspect_patches(Config(high_availability=True))
    reading.patches = [row.problem for row in report.rows if row.blocks]


@contextlib.contextmanager
def _only_the_answer_on_stdout() -> Iterator[io.TextIOBase]:
    """Megatron prints its arguments: send that, and what C++ writes, to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def main() -> None:
    """Answer one question."""
    question = json.loads(sys.stdin.read())
    with _only_the_answer_on_stdout() as out:
        out.write(json.dumps(asdict(answer(question))))


if __name__ == "__main__":
    main()
