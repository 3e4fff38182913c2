"""The command line of `mindio-tft drill`: what is to be injected into which job, checked before anything starts."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mindio_tft_patch.adaptors.doctor.command import (
    PYTHON,
    Command,
    Launch,
    read_command,
    read_leniently,
    without_launcher,
)
from mindio_tft_patch.config import MASTER_FLAG, read_config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import STATE_VARIABLE, VARIABLE, PlannedFault, read_schedule
from mindio_tft_patch.random_faults import EVERY_STEP, PROMPT_KINDS, random_schedule

_SAVING = ("--save", "--tensorboard-dir")
_OURS = ("TFT_", "TTP_", "HIGH_AVAILABILITY")  # variables that change what a job does about a fault
_INJECTION = (VARIABLE, STATE_VARIABLE)


@dataclass(frozen=True)
class Drill:
    """A drill that can start.

    Attributes:
        words: the training command without variables in front. variables: those.
        schedule: as TFT_INJECT has it. faults: the same, parsed.
        ranks: of the job; 0: not known.
        folder: for everything that the drill writes. html: path of the page; None: none is wanted.
        compare: run the job without faults as well. resume: start it again after a checkpoint on a fault.
        limit_seconds: for each run; None: none.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    schedule: str
    faults: tuple[PlannedFault, ...]
    ranks: int
    folder: Path
    html: Path | None = None
    compare: bool = False
    resume: bool = False
    limit_seconds: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--faults", metavar="SCHEDULE", help="rank=1,step=5,moment=forward,kind=sigkill; ...")
    which.add_argument("--random", type=int, metavar="N", help="N faults by chance")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: %(default)s)")
    parser.add_argument("--kinds", metavar="A,B", help=f"of --random (default: {','.join(PROMPT_KINDS)})")
    parser.add_argument("--moments", metavar="A,B", help=f"of --random (default: {','.join(EVERY_STEP)})")
    parser.add_argument("--spacing", type=int, default=2, metavar="STEPS", help="of --random (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="of the job, where its command does not say")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="of the job (default: its --train-iters)")
    parser.add_argument("--compare", action="store_true", help="run it once without faults too, and compare the losses")
    parser.add_argument("--resume", action="store_true", help="start the command again when a fault ended in a dump")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a run that takes longer")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a web page")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for output and logs (default: drill-<time>)")


def prepare(options: argparse.Namespace, training: Sequence[str], environ: Mapping[str, str]) -> Drill:
    """Check everything that can be checked.

    Raises:
        ConfigError: the drill makes no sense; the message says what to change.
    """
    command = read_command(training)
    words, variables = _without_variables(training)
    together = {**environ, **variables}
    _check_protected(command, words, together)
    launch = _launch(command, together)
    ranks, steps = options.ranks or launch.world_size, options.steps or _iterations(words)
    schedule = _schedule(options, ranks, steps, environ)
    faults = read_schedule(schedule, VARIABLE if options.faults is None else "--faults")
    if not faults:
        raise ConfigError("There is no fault to inject.", change="Give --faults or --random, or set TFT_INJECT.")
    _check_ranks(faults, ranks)
    folder = (options.out or Path(time.strftime("drill-%Y%m%d-%H%M%S"))).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty.", change="Give another folder with --out.")
    return Drill(
        words=words,
        variables=variables,
        schedule=schedule,
        faults=faults,
        ranks=ranks,
        folder=folder,
        html=options.html,
        compare=options.compare,
        resume=options.resume,
        limit_seconds=options.limit,
    )


def elsewhere(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The same command, but what it saves goes below `folder`: the job to compare with must not leave checkpoints
    from which the other one would begin.
    """
    changed: list[str] = []
    follows = ""
    for word in words:
        name, equals, _ = word.partition("=")
        if follows:
            changed.append(str(folder / follows.lstrip("-")))
            follows = ""
        elif name in _SAVING:
            changed.append(f"{name}={folder / name.lstrip('-')}" if equals else word)
            follows = "" if equals else name
        else:
            changed.append(word)
    return tuple(changed)


def again(
    plan: Drill, options: argparse.Namespace, folder: Path, environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """What to type to do the same drill once more. folder, environ: in which it was started."""
    words = ["mindio-tft", "drill", "--faults", plan.schedule]
    words += [name for name, wanted in (("--compare", plan.compare), ("--resume", plan.resume)) if wanted]
    if plan.limit_seconds is not None:
        words += ["--limit", f"{plan.limit_seconds:g}"]
    if options.ranks:
        words += ["--ranks", str(options.ranks)]
    ours = {name: value for name, value in environ.items() if name.startswith(_OURS) and name not in _INJECTION}
    variables = [f"{name}={value}" for name, value in {**ours, **plan.variables}.items()]
    return shlex.join(["cd", str(folder)]), shlex.join([*words, "--", *variables, *plan.words])


def _without_variables(training: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Split `NAME=value command ...` as a shell would; a word `env` in front is dropped."""
    words, variables = list(training), {}
    if words[:1] == ["env"] and not "".join(words[1:2]).startswith("-"):  # options of env are for env
        words.pop(0)
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return tuple(words), variables


def _check_protected(command: Command, words: Sequence[str], environ: Mapping[str, str]) -> None:
    if not words:
        raise ConfigError("The training command has no word that could be started.")
    config = read_config(words, environ)
    # A script of unknown name may add the flag itself; then the missing log will tell.
    if command.launcher and not config.high_availability:
        raise ConfigError(
            f"The training command does not have {MASTER_FLAG}: nothing would take notice of the faults.",
            change=f"Add {MASTER_FLAG} to it (or set HIGH_AVAILABILITY).",
        )


def _launch(command: Command, environ: Mapping[str, str]) -> Launch:
    if not command.launcher:
        return Launch(ranks_per_node=0)
    return without_launcher(command, environ) if command.launcher == PYTHON else read_leniently(command.words)


def _iterations(words: Sequence[str]) -> int:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--train-iters":
            text = value if equals else next(iter(words[position + 1 :]), "")
            return int(text) if text.isdecimal() else 0
    return 0


def _schedule(options: argparse.Namespace, ranks: int, steps: int, environ: Mapping[str, str]) -> str:
    if options.random is None:
        return str(options.faults or environ.get(VARIABLE, ""))
    if not ranks:
        raise ConfigError("The command does not say how many ranks the job has.", change="Give --ranks N.")
    if not steps:
        raise ConfigError("The command does not have --train-iters.", change="Give --steps N.")
    return random_schedule(
        options.seed,
        options.random,
        ranks,
        steps,
        kinds=_names(options.kinds, PROMPT_KINDS),
        moments=_names(options.moments, EVERY_STEP),
        spacing=options.spacing,
    )


def _names(text: str | None, default: Sequence[str]) -> Sequence[str]:
    return default if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _check_ranks(faults: Sequence[PlannedFault], ranks: int) -> None:
    strangers = sorted({fault.rank for fault in faults if not 0 <= fault.rank < (ranks or fault.rank + 1)})
    if strangers:
        raise ConfigError(
            f"The schedule names rank {', '.join(map(str, strangers))}; the job has {ranks} ranks.",
            change=f"Use 0 to {ranks - 1}." if ranks else "",
        )
