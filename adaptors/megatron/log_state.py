"""Keeps Megatron's training log the same across a dump and a restart.

Megatron averages the losses of `--log-interval` iterations in a dictionary that no checkpoint holds, and newer releases
also log the first iteration after every start and then average it into the next line. So the log of a resumed job
differs from that of an unbroken one although training is equal. A small JSON file beside the dump holds the sums; a
resumed job takes them up. Megatron itself ignores the file.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("mindio_tft_patch.megatron")

FILE_NAME = "tft_log_state.json"


class LogState:
    """The running sums of one rank's training log."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._carried: dict[str, Any] | None = None
        self._resumed = False
        self._log_interval = 1
        self._logged: int | None = (
            None  # last iteration whose call came to its end, where it prints and clears the sums
        )

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
        if self._resumed and self._carried is not None:
            self._sums.update({name: _revived(value) for name, value in self._carried.items()})
            if kwargs.get("is_first_iteration"):
                kwargs = {**kwargs, "is_first_iteration": False}
        self._resumed, self._carried = False, None
        self._logged = None
        result = wrapped(*args, **kwargs)
        self._logged = _iteration(wrapped, args, kwargs)
        return result

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
    try:
        return int(inspect.signature(training_log).bind(*args, **kwargs).arguments["iteration"])
    except (KeyError, TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    return {"float32": value.detach().float().tolist()} if isinstance(value, torch.Tensor) else value


def _revived(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.tensor(value["float32"], dtype=torch.float32, device="cuda")
