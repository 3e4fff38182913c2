"""What is examined of a trainer with handlers of its own (TFT_ADAPTOR=own): nothing that is Megatron's."""

from __future__ import annotations

from collections.abc import Iterator

from mindio_tft_patch.adaptors.doctor.findings import Finding, Level, warning
from mindio_tft_patch.adaptors.doctor.reading import Reading
from mindio_tft_patch.adaptors.doctor.script import judge_words
from mindio_tft_patch.config import Config


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
