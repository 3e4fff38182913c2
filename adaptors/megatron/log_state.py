"""Keeps Megatron's training log the same across a dump and a restart, and across a recovery in place.

Megatron averages the losses of `--log-interval` iterations in a dictionary that no checkpoint holds, and newer releases
also log the first iteration after every start and then average it into the next line. So the log of a resumed job
differs from that of an unbroken one although training is equal. A small JSON file beside the dump holds the sums; a
resumed job takes them up. Megatron itself ignores the file.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("mindio_tft_patch.megatron")

FILE_NAME = "tft_log_state.json"


@dataclass(frozen=True)
class LogPosition:
    """Where the training log of one rank stands; also what a process that has come back takes over from a partner.

    Attributes:
        sums: running sums after the last call of training_log that has begun.
        before: the sums before that call.
        began: iteration of that call; None: there was none.
        first: that call had to treat its iteration as the first one of the job.
    """

    sums: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    began: int | None = None
    first: bool = False


class LogState:
    """The running sums of one rank's training log.

    Attributes:
        keeps_position: the job is recovered in place, so that the sums before each call are kept.
    """

    def __init__(self) -> None:
        self.keeps_position = False
        self._sums: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._began: int | None = None
        self._first = False
        self._carried: dict[str, Any] | None = None
        self._first_again: bool | None = None
        self._resumed = False
        self._log_interval = 1
        # Last iteration whose call came to its end, where it prints and clears the sums.
        self._logged: int | None = None

    def resume(self, iteration: int, directory: Path | None, log_interval: int) -> None:
        """A job starts at `iteration`, which it loaded from `directory`; it logs every `log_interval` iterations."""
        self._resumed = iteration > 0
        self._log_interval = log_interval
        if not self._resumed or directory is None:
            return
        try:
            content = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            # An ordinary checkpoint: nothing is carried over, except that at the end of an interval nothing had to be.
            self._carried = {} if iteration % log_interval == 0 else None
            return
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s); the first averages of the log start anew", FILE_NAME, error)
            return
        if isinstance(content, dict) and content.get("iteration") == iteration:
            self._carried = content["sums"]

    def around_training_log(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of training_log(loss_dict, total_loss_dict, ...)."""
        self._sums = args[1]
        first = bool(kwargs.get("is_first_iteration"))
        if self._resumed and self._carried is not None:
            self._sums.update({name: _revived(value) for name, value in self._carried.items()})
            first = False
        if self._first_again is not None:
            first = self._first_again
        self._resumed, self._carried, self._first_again = False, None, None
        if "is_first_iteration" in kwargs:
            kwargs = {**kwargs, "is_first_iteration": first}
        iteration = _iteration(wrapped, args, kwargs)
        if self.keeps_position:
            self._before, self._began, self._first = _copies(self._sums), iteration, first
        self._logged = None
        result = wrapped(*args, **kwargs)
        self._logged = iteration
        return result

    def position(self) -> LogPosition:
        """Where the log stands, for a process that has come back."""
        return LogPosition(_copies(self._sums), self._before, self._began, self._first)

    def reenter(self, step: int, position: LogPosition | None, *, repeat_end: bool) -> None:
        """train() is entered again after `step`, with empty sums.

        Args:
            position: of a partner; None: this rank's own.
            repeat_end: the log line of `step` is going to be written (again).
        """
        at = position or self.position()
        if at.began is None:
            return  # nothing was ever logged: as at the start
        again = repeat_end and at.began == step
        self._carried, self._resumed = dict(at.before if again else at.sums), True
        self._first_again = at.first if again else False

    def files(self, iteration: int) -> dict[str, bytes]:
        """The file for a checkpoint of `iteration`; none on ranks that have no losses (not the last pipeline stage).

        Floats of float32 survive JSON exactly.
        """
        if not any(isinstance(value, torch.Tensor) for value in self._sums.values()):
            return {}
        sums = {name: _plain(value) for name, value in self._sums.items()}
        if self._logged != iteration and iteration % self._log_interval == 0:
            # The line of this interval is lost; its sums must not get into the next one. The names must: Megatron
            # prints those that it has seen, also in an iteration whose update is skipped.
            sums = {name: _plain(value * 0) for name, value in self._sums.items()}
        return {FILE_NAME: json.dumps({"iteration": iteration, "sums": sums}).encode()}


def _iteration(training_log: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The argument `iteration`, whose position differs between releases."""
    position = _position_of_iteration(training_log)
    value = args[position] if position is not None and position < len(args) else kwargs.get("iteration")
    return None if value is None else int(value)


@functools.lru_cache(maxsize=4)  # reading a signature is too slow for every step
def _position_of_iteration(training_log: Any) -> int | None:
    names = list(inspect.signature(training_log).parameters)
    return names.index("iteration") if "iteration" in names else None


def _copies(sums: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in sums.items()}


def _plain(value: Any) -> Any:
    return {"float32": value.detach().float().tolist()} if isinstance(value, torch.Tensor) else value


def _revived(value: Any) -> Any:
    if not isinstance(value, dict):  # a number, or a sum that never left this process or its partner
        return value
    return torch.tensor(value["float32"], dtype=torch.float32, device="cuda")
