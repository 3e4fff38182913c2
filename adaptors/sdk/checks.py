"""Ranges of the SDK's parameters. A refusal says which call, which parameter, what was given and what is allowed."""

from __future__ import annotations

import inspect
import ipaddress
import re
from collections.abc import Callable
from typing import Any

from mindio_tft_patch.errors import ConfigError

WORLD_SIZE_MAX = 100_000
STEP_END = 2**63 - 1  # the first number that is no step any more
PORTS = (1024, 65535)

_ZEROS = re.compile(r"0+(\.0+){0,3}")  # "0" and "0.0" are resolved to 0.0.0.0


def integer(call: str, name: str, value: Any, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{call}: {name} is {value!r}.", change=f"Pass a whole number from {low} to {high}.")
    return value


def switch(call: str, name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{call}: {name} is {value!r}.", change="Pass True or False.")
    return value


def world_size(call: str, value: Any) -> int:
    """Number of ranks of the job."""
    return integer(call, "world_size", value, 1, WORLD_SIZE_MAX)


def rank(call: str, value: Any, size: int, *, lowest: int = 0) -> int:
    """A rank of a job with `size` ranks. lowest: -1 where a launcher may call too."""
    return integer(call, "rank", value, lowest, size - 1)


def port(call: str, value: Any) -> int:
    """A TCP port that needs no privileges."""
    return integer(call, "port", value, *PORTS)


def address(call: str, name: str, value: Any, *, may_be_empty: bool = False) -> str:
    """An IPv4 or IPv6 address or a host name, without brackets; the all-zero addresses are none to connect to.

    Raises:
        ConfigError: it is none.
    """
    text = value.strip().strip("[]") if isinstance(value, str) else None
    if text == "" and may_be_empty:
        return text
    if not text or any(character.isspace() or character == "/" for character in text):
        raise ConfigError(f"{call}: {name} is {value!r}.", change="Pass an IPv4 or IPv6 address or a host name.")
    if _all_zero(text):
        raise ConfigError(
            f"{call}: {name} is {value!r}, an all-zero address, which nobody can connect to.",
            change="Pass the address of a network interface of the node.",
        )
    return text


def function(call: str, name: str, value: Any) -> Callable[..., Any]:
    """Something that can be called, and has done its work when it returns.

    Raises:
        TypeError: it is not.
    """
    if not callable(value):
        raise TypeError(f"{call}: {name} must be callable, not {value!r}")
    if inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise TypeError(f"{call}: {name} must do its work when it is called; {value!r} only hands out an object for it")
    return value  # type: ignore[no-any-return]


def _all_zero(text: str) -> bool:
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return _ZEROS.fullmatch(text) is not None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_unspecified
