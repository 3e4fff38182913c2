"""Jobs of the Megatron-LM of 2023 (MEGATRON_LEGACY_PATH), started by the real ttprun."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.jobs import SCRIPT, Job, JobSpec, start_ttprun

TREE = "MEGATRON_LEGACY_PATH"
_WRAPPER = Path(__file__).with_name("legacy_pretrain.py")


@dataclass(frozen=True)
class LegacySpec(JobSpec):
    """A job to be started.

    script: what ttprun starts; by default pretrain_gpt.py of the tree.
    """

    script: Path = _WRAPPER

    def command_line(self, script: Path = SCRIPT) -> list[str]:
        """Arguments of ttprun."""
        return super().command_line(self.script)


def run(spec: LegacySpec, seconds: float = 240.0) -> Job:
    """Start a job and wait for its end."""
    job = start_ttprun(spec)
    job.wait(seconds)
    return job
