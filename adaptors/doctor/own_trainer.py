"""What is examined of a trainer with handlers of its own (TFT_ADAPTOR=own): nothing that is Megatron's."""

from __future__ import annotations

from collections.abc import Iterator

from mindio_tft_patch.adaptors.doctor.findings import Finding, Level, error, ok, warning
from mindio_tft_patch.adaptors.doctor.reading import Reading
from mindio_tft_patch.adaptors.doctor.script import judge_words
from mindio_tft_patch.config import Config


def is_own(config: Config) -> bool:
    """The framework brings handlers of its own, and nothing of Megatron is patched."""
    return config.adaptor == "own"


def judge(read: Reading, config: Config) -> Iterator[Finding]:
    """In place of Megatron's arguments, topology, save folder and data."""
    yield warning(
        "command",
        "TFT_ADAPTOR=own: the trainer is not Megatron's, so its own arguments, its save folder and data, who holds "
        "which optimizer shard, and what a fault will lead to were not looked at.",
        "Nothing here; check_handlers (docs/porting.md) tells whether the handlers can do what the flags ask for.",
    )
    # A misspelt flag of ours switches nothing on; every other word is the script's own.
    yield from (found for found in judge_words(read.launch.script_args, ()) if found.level is Level.ERROR)
    if read.trouble:
        yield warning(
            "versions", f"torch could not be asked ({read.trouble}).", "Run the doctor where the job will run."
        )
    yield from _judge_device(read, config.device)


def _judge_device(read: Reading, device: str) -> Iterator[Finding]:
    if read.accelerator or not read.torch:
        return
    if device in ("cuda", "npu"):
        yield error("device", f"TFT_DEVICE={device}, but torch finds no such device here.", "Unset TFT_DEVICE.")
    elif device == "cpu":
        yield ok("device", "No accelerator: the CPU stands in for it, over gloo.")
    else:
        yield warning(
            "device",
            "No accelerator is present here.",
            "Run the doctor where the job will run; to train on the CPU, set TFT_DEVICE=cpu.",
        )
