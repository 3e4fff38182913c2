"""`ttprun`: torchrun for jobs that survive a fault long enough to save their last step.

It takes torchrun's options and hands them to torchrun's own code; only --standby is its own. A job that does not use
the plugin (no --enable-high-availability, no HIGH_AVAILABILITY) *is* run by torchrun, nothing added. For a job that
does, torchelastic's agent is replaced by launch.agent.FaultTolerantAgent: that is the only difference.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.launcher.api as launcher_api
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.ttprun_options import parse_ttprun
from mindio_tft_patch.adaptors.unknown_words import STANDBY, misplaced
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.errors import ConfigError, TftError, UnsupportedError
from mindio_tft_patch.launch.early_end import likely_causes
from mindio_tft_patch.launch.report import early_lines, formatted, signal_name
from mindio_tft_patch.launch.run_folder import run_folder
from mindio_tft_patch.variables import complaints

if TYPE_CHECKING:
    from mindio_tft_patch.launch.agent import FaultTolerantAgent

log = logging.getLogger("mindio_tft_patch.launch")

_SHARE_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

# What launch.agent builds on; checked before the start, because a torch release may move it.
_EXPECTED: dict[str, tuple[str, ...]] = {
    "__init__": ("spec", "logs_specs"),
    "run": ("self",),
    "_rendezvous": ("worker_group",),
    "_start_workers": ("worker_group",),
    "_stop_workers": ("worker_group",),
    "_monitor_workers": ("worker_group",),
}


def check_torch(agent_class: type, launcher: object, version: str) -> None:
    """Refuse a torch whose elastic agent is not the one that launch.agent extends.

    Raises:
        UnsupportedError: a method or parameter is missing.
    """
    missing = [] if hasattr(launcher, "LocalElasticAgent") else ["torch.distributed.launcher.api.LocalElasticAgent"]
    for name, parameters in _EXPECTED.items():
        method = getattr(agent_class, name, None)
        found = inspect.signature(inspect.unwrap(method)).parameters if callable(method) else {}
        if method is None or any(parameter not in found for parameter in parameters):
            missing.append(f"LocalElasticAgent.{name}({', '.join(parameters)})")
    if missing:
        raise UnsupportedError(
            f"ttprun does not know the elastic agent of torch {version}: {', '.join(missing)} is not there.",
            change="Use torch 2.6 to 2.14, or start the job with torchrun (the controller then lives in rank 0).",
        )


def check_torch_in_place(missing: Sequence[str], version: str) -> None:
    """Refuse a torch whose records of processes are not those that launch.respawn keeps true.

    Raises:
        UnsupportedError: something is missing.
    """
    if missing:
        raise UnsupportedError(
            f"ttprun cannot restart a single rank under torch {version}: {', '.join(missing)} is not there.",
            change="Use a torch that ttprun knows (2.6 to 2.14), or remove --enable-hbmfault-repair, "
            "--enable-worker-reboot and --distributed-optimizer-no-replica.",
        )


def job_config(arguments: Namespace, environ: Any = None) -> Config:
    """Flags and variables of the job that torchrun's arguments describe.

    Raises:
        ConfigError: a combination that cannot work, or an option of ttprun behind the script's name.
    """
    config = read_config(arguments.training_script_args, os.environ if environ is None else environ)
    if config.high_availability and getattr(arguments, "run_path", False):
        raise ConfigError(
            "--run-path starts ranks inside torchrun's own interpreter, which cannot be watched one by one.",
            change="Remove --run-path.",
        )
    problem = misplaced(arguments.training_script_args, config)
    if problem is not None:
        raise problem
    if not config.high_availability:
        # Who has misspelt the only word that switches anything on would train without protection, and not know it.
        _say(*(warning for warning in config.warnings if warning.startswith("HIGH_AVAILABILITY")))
    return config


@contextmanager
def _agent_replaced(config: Config, standbys: int, made: list[FaultTolerantAgent]) -> Iterator[None]:
    """Let torchelastic's launcher make our agent instead of its own."""
    from mindio_tft_patch.launch.agent import FaultTolerantAgent

    def make(**arguments: Any) -> FaultTolerantAgent:
        made.append(FaultTolerantAgent(config, standbys, **arguments))
        return made[-1]

    original = launcher_api.LocalElasticAgent
    launcher_api.LocalElasticAgent = make
    try:
        yield
    finally:
        launcher_api.LocalElasticAgent = original


def _prepare_environment(config: Config) -> None:
    """What ranks inherit, and what torchelastic must do for the job's store to outlive rank 0."""
    os.environ["TFT_CONTROLLER"] = "agent"
    if os.environ.get(_SHARE_STORE_VARIABLE) == "1":
        _say(f"{_SHARE_STORE_VARIABLE}=1 is ignored: the job's store has to outlive rank 0")
    os.environ[_SHARE_STORE_VARIABLE] = "0"
    logs.configure(config, role="launcher")
    for complaint in complaints(os.environ):
        log.warning("%s", complaint)


def _say(*lines: str) -> None:
    sys.stderr.write(formatted(lines))
    sys.stderr.flush()


def _text_of_script(arguments: Namespace) -> str | None:
    """What stands in the training script; None: it is no file that Python runs, or cannot be read."""
    if arguments.module or arguments.no_python:
        return None
    try:
        return Path(arguments.training_script).read_text(errors="replace")
    except OSError:
        return None


def _run_protected(arguments: Namespace, config: Config) -> int:
    """Run a job that uses the plugin; the exit code."""
    check_torch(LocalElasticAgent, launcher_api, torch.__version__)
    if config.in_place:
        from mindio_tft_patch.launch.respawn import missing_in_torch

        check_torch_in_place(missing_in_torch(), torch.__version__)
    elif arguments.standby:
        _say(f"{STANDBY} is ignored: without --enable-worker-reboot no rank is ever started again alone")
    _prepare_environment(config)
    made: list[FaultTolerantAgent] = []
    # As torchrun's main does; it copies the error file of the first failed rank to where a scheduler looks for it.
    run: Callable[[Namespace], object] = record(torchrun.run)
    try:
        with run_folder(), _agent_replaced(config, arguments.standby if config.in_place else 0, made):
            run(arguments)
    except ChildFailedError as failed:
        # The agent has told what happened. Without an ending of ours the fault came before any rank had registered.
        if not any(agent.endings for agent in made):
            rank, failure = failed.get_first_failure()
            told = failure.message if isinstance(failure.message, str) else ""
            causes = likely_causes(
                arguments.training_script, _text_of_script(arguments), arguments.training_script_args
            )
            _say(*early_lines(rank, failure.exitcode, told, causes))
        return 1
    except SignalException as error:
        _say(f"the job ended because the launcher received {signal_name(error.sigval)}; there was nothing to save")
        return 1
    except TftError as error:
        _say(str(error))
        return 1
    except RendezvousError as error:
        _say(
            f"the launchers of the nodes have lost each other: {str(error).partition(chr(10))[0]}",
            "the launcher of the first node, or the network to it, is gone; this node's ranks have been ended",
        )
        return 1
    except torch.distributed.DistNetworkError as error:
        _say(
            f"the launchers cannot meet: {str(error).partition(chr(10))[0]}",
            "check --master-addr and --master-port (or --rdzv-endpoint): the address must be that of node 0, and the "
            "port free there",
        )
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `ttprun`."""
    arguments, words = parse_ttprun(list(sys.argv[1:] if argv is None else argv))
    try:
        config = job_config(arguments)
        if config.high_availability:
            code = _run_protected(arguments, config)
        else:
            torchrun.main(words)
            code = 0
    except TftError as error:
        _say(str(error))
        code = 1
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
