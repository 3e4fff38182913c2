"""The text log and the JSON-lines log beside it.

    ttp_log.log[.<pid>]     for people
    ttp_log.jsonl[.<pid>]   one JSON object a line: time, level, logger, rank, attempt, phase, message, and the fields
                            that a caller passed as `extra={"fields": {...}}`

Rank, attempt and phase are added here, from CONTEXT, and not typed into messages. A log that cannot be written never
ends training: the first failure is said on standard error, the others are swallowed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mindio_tft_patch.config import Config

ROOT = "mindio_tft_patch"


@dataclass
class LogContext:
    """What every line of this process says about where it is in a recovery."""

    rank: int | None = None
    role: str = "processor"
    attempt: int = 0
    phase: str = ""


CONTEXT = LogContext()


class _ContextFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, "fields", {})
        who = CONTEXT.role if CONTEXT.rank is None else f"rank {CONTEXT.rank}"
        attempt = fields.get("attempt", CONTEXT.attempt)
        phase = fields.get("phase", CONTEXT.phase)
        record.tft = {"rank": CONTEXT.rank, "role": CONTEXT.role, "attempt": attempt, "phase": phase}
        record.where = f"{who} attempt {attempt} {phase}".strip() if attempt or phase else who
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            **getattr(record, "tft", {}),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Forgiving:
    """Mixin of a handler: a failure to write is reported once, and ends nothing."""

    complained = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - name of the standard library
        if self.complained:
            return
        self.complained = True
        _say(f"the log cannot be written ({sys.exc_info()[1]}); training goes on without it")


class _ForgivingStream(_Forgiving, logging.StreamHandler):  # type: ignore[type-arg]
    pass


class _ForgivingFile(_Forgiving, logging.FileHandler):
    def _open(self):  # type: ignore[no-untyped-def]
        # A file that is a symbolic link would let somebody else choose what we write to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o640), "a", encoding="utf-8")


def _say(message: str) -> None:
    try:
        print(f"mindio_tft_patch: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def configure(config: Config, *, role: str = "processor", rank: int | None = None) -> None:
    """Set up logging of this process; a second call replaces what the first has set up.

    Args:
        role: "processor", "agent" or "launcher"; stands in the lines of a process without rank.
        rank: global rank of a processor.
    """
    CONTEXT.role, CONTEXT.rank = role, rank
    parent = logging.getLogger(ROOT)
    reset()
    parent.setLevel(config.log_level)
    # Megatron and users configure the root logger in their own ways; our lines must neither vanish nor appear twice.
    parent.propagate = False
    for handler in _handlers(config):
        handler.addFilter(_ContextFilter())
        parent.addHandler(handler)
    if _speaks_for_all(config, role):
        for warning in config.warnings:
            parent.warning("%s", warning)


def _speaks_for_all(config: Config, role: str) -> bool:
    """All processes have read the same variables: one of them warns, the launcher where it is ours."""
    return role == "launcher" or (config.rank == 0 and not config.started_by_ttprun)


def reset() -> None:
    """Remove and close the handlers that `configure` has set up."""
    parent = logging.getLogger(ROOT)
    for handler in [handler for handler in parent.handlers if isinstance(handler, _Forgiving)]:
        parent.removeHandler(handler)
        with suppress(OSError):  # a full disk shows again when the last lines are flushed
            handler.close()
    parent.propagate = True


def _handlers(config: Config) -> list[logging.Handler]:
    text = logging.Formatter("%(asctime)s %(levelname)s [%(where)s] %(name)s: %(message)s")
    if config.log_stdout:
        return [_with(_ForgivingStream(sys.stdout), text)]
    try:
        folder = _folder(config.log_path)
        suffix = f".{os.getpid()}" if config.log_per_process else ""
        files = [
            _with(_ForgivingFile(folder / f"ttp_log.log{suffix}"), text),
            _with(_ForgivingFile(folder / f"ttp_log.jsonl{suffix}"), _JsonFormatter()),
        ]
    except OSError as error:
        _say(f"no log can be written under {config.log_path} ({error}); using standard error. Set TTP_LOG_PATH.")
        return [_with(_ForgivingStream(sys.stderr), text)]
    # A person who watches the terminal must see why a job ends, wherever the files are.
    terminal = _with(_ForgivingStream(sys.stderr), text)
    terminal.setLevel(logging.WARNING)
    return [*files, terminal]


def _with(handler: logging.Handler, formatter: logging.Formatter) -> logging.Handler:
    handler.setFormatter(formatter)
    return handler


def _folder(path: Path) -> Path:
    if path.is_symlink():
        raise OSError(f"{path} is a symbolic link")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def timed(logger: logging.Logger, what: str) -> Iterator[None]:
    """Log how long a stretch of work took, also when it raises."""
    began = time.monotonic()
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        seconds = time.monotonic() - began
        logger.info("%s: %s in %.3f s", what, outcome, seconds, extra={"fields": {"what": what, "seconds": seconds}})
