"""When a job gets the CPU stand-in."""

from __future__ import annotations

import pytest

from mindio_tft_patch.adaptors.device.cpu import wanted


def no_accelerator() -> bool:
    """A machine without one."""
    return False


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, False),
        ([], {"TFT_DEVICE": "cpu"}, True),
        ([], {"TFT_DEVICE": " CPU "}, True),
        (["--distributed-backend", "gloo"], {}, True),
        (["--distributed-backend=gloo"], {}, True),
        (["--distributed-backend", "gloo"], {"TFT_DEVICE": "auto"}, True),
        (["--distributed-backend", "gloo"], {"TFT_DEVICE": ""}, True),
        (["--distributed-backend", "gloo"], {"TFT_DEVICE": "cuda"}, False),
        (["--distributed-backend", "nccl"], {}, False),
        (["--distributed-backend", "gloo", "--distributed-backend", "nccl"], {}, False),
        (["--distributed-backend"], {}, False),
        (["gloo"], {}, False),
    ],
)
def test_the_stand_in_is_given_to_those_who_ask(argv: list[str], environ: dict[str, str], expected: bool) -> None:
    assert wanted(argv, environ, accelerator=no_accelerator) is expected


@pytest.mark.parametrize(("argv", "environ"), [([], {"TFT_DEVICE": "cpu"}), (["--distributed-backend", "gloo"], {})])
def test_a_machine_with_an_accelerator_never_gets_it(argv: list[str], environ: dict[str, str]) -> None:
    assert wanted(argv, environ, accelerator=lambda: True) is False


def test_a_job_that_does_not_ask_is_not_searched_for_an_accelerator() -> None:
    def search() -> bool:
        raise AssertionError("asking imports torch")

    assert wanted(["--distributed-backend", "nccl"], {}, accelerator=search) is False
