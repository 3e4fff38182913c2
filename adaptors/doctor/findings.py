"""What the doctor says: one finding for each thing looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """Whether the job will hold."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: what it is about: command, flags, topology, versions, network, descriptors, save, data, variables.
        message: what was found, and why it matters.
        change: what to change, naming the flag or variable; empty when nothing needs changing.
    """

    level: Level
    area: str
    message: str
    change: str = ""


def ok(area: str, message: str) -> Finding:
    """Something that holds."""
    return Finding(Level.OK, area, message)


def warning(area: str, message: str, change: str) -> Finding:
    """Something that the user should know."""
    return Finding(Level.WARNING, area, message, change)


def error(area: str, message: str, change: str) -> Finding:
    """Something that will not hold."""
    return Finding(Level.ERROR, area, message, change)
