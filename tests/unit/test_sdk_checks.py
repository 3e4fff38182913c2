"""Ranges and forms of the SDK's parameters, as documented, and what a refusal says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from mindio_tft_patch.adaptors.sdk import checks
from mindio_tft_patch.errors import ConfigError


@pytest.mark.parametrize(("rank", "size", "lowest"), [(0, 1, 0), (7, 8, 0), (-1, 8, -1), (99_999, 100_000, 0)])
def test_a_rank_of_the_job_is_taken(rank: int, size: int, lowest: int) -> None:
    assert checks.rank("tft_call", rank, size, lowest=lowest) == rank


@pytest.mark.parametrize(("rank", "size", "lowest"), [(8, 8, 0), (-1, 8, 0), (-2, 8, -1), ("0", 8, 0), (True, 8, 0)])
def test_another_rank_is_refused(rank: Any, size: int, lowest: int) -> None:
    with pytest.raises(ConfigError, match=rf"tft_call: rank is .* from {lowest} to {size - 1}"):
        checks.rank("tft_call", rank, size, lowest=lowest)


@pytest.mark.parametrize("size", [1, 8, 100_000])
def test_a_world_size_is_taken(size: int) -> None:
    assert checks.world_size("tft_call", size) == size


@pytest.mark.parametrize("size", [0, -1, 100_001, 1.0, None, "8", True])
def test_another_world_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"world_size is .* from 1 to 100000"):
        checks.world_size("tft_call", size)


@pytest.mark.parametrize("port", [1024, 8000, 65535])
def test_a_port_is_taken(port: int) -> None:
    assert checks.port("tft_call", port) == port


@pytest.mark.parametrize("port", [0, 1023, 65536, -1, "8000", None])
def test_another_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match=r"port is .* from 1024 to 65535"):
        checks.port("tft_call", port)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        (" 127.0.0.1 ", "127.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("[fd00::1]", "fd00::1"),
        ("master-0.job.svc", "master-0.job.svc"),
    ],
)
def test_an_address_is_taken(given: str, expected: str) -> None:
    assert checks.address("tft_call", "master_ip", given) == expected


@pytest.mark.parametrize(
    "zero", ["0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "0", "0.0", "000.0.0.0"]
)
def test_an_all_zero_address_is_refused(zero: str) -> None:
    with pytest.raises(ConfigError, match="all-zero address, which nobody can connect to"):
        checks.address("tft_call", "master_ip", zero)


@pytest.mark.parametrize("wrong", ["", "  ", "a b", "http://x", None, 7])
def test_what_is_no_address_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"tft_call: master_ip is .* address or a host name"):
        checks.address("tft_call", "master_ip", wrong)


def test_an_address_may_be_left_out_where_that_is_documented() -> None:
    assert checks.address("tft_call", "local_ip", "", may_be_empty=True) == ""
    with pytest.raises(ConfigError):
        checks.address("tft_call", "local_ip", "0.0.0.0", may_be_empty=True)


def test_a_switch_is_true_or_false() -> None:
    assert checks.switch("tft_call", "enable_tls", True) is True
    with pytest.raises(ConfigError, match=r"enable_tls is 1\. Pass True or False"):
        checks.switch("tft_call", "enable_tls", 1)


def test_what_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tft_call: func must be callable, not 5"):
        checks.function("tft_call", "func", 5)


async def coroutine() -> None:
    """Does nothing when it is called."""


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("value", [coroutine, generator, functools.partial(coroutine)])
def test_what_only_hands_out_an_object_is_no_function_to_call(value: object) -> None:
    with pytest.raises(TypeError, match="must do its work when it is called"):
        checks.function("tft_exception_handler", "func", value)
    assert checks.function("call", "name", print) is print
