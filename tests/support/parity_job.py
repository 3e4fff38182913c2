"""A training job that writes down what the optimizer reports, with or without the replica layout.

    parity_job.py LAYOUT REPORT script arguments...

LAYOUT: "plain" or "copies". Only the patches of adaptation points 3 and 4 are applied, and only for "copies". The
report of each rank, REPORT.<rank>, is a JSON object:

    steps      [[losses, gradient norm, zeros], ...], one for each iteration
    memory     [[with_padding, expected], ...], bytes of each distributed optimizer, measured and by the formula
    per_param  bytes of a parameter without padding, summed over the ranks of one copy and divided by the parameters
    sets       {"dense": [ranks], ...}
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

LAYOUT, REPORT, SCRIPT = sys.argv[1:4]
sys.argv = sys.argv[3:]

import mindio_tft_patch  # noqa: E402, F401  (first: brings in the CPU stand-in)
from mindio_tft_patch.adaptors.megatron import arguments, groups, replica, replica_bytes, validate, versions  # noqa: E402
from mindio_tft_patch.config import MASTER_FLAG, read_config  # noqa: E402
from mindio_tft_patch.patching import Patch, PatchManager  # noqa: E402


class Recorder:
    """Collects the report of this rank."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.report: dict[str, Any] = {"steps": []}

    def built(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the optimizer."""
        self.optimizer = wrapped(*args, **kwargs)
        return self.optimizer

    def stepped(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record what train_step returns; its tail is (..., gradient norm, zeros[, ...])."""
        result = wrapped(*args, **kwargs)
        losses = [value for _, loss in sorted((result[0] or {}).items()) for value in loss.flatten().tolist()]
        norm, zeros = (float(value) if value is not None else None for value in result[5:7])
        self.report["steps"].append([losses, norm, zeros])
        self.report["memory"] = [self.memory(one) for one in replica_bytes.distributed_optimizers(self.optimizer)]
        self.report["sets"] = {replicas.name: replicas.ranks for replicas in groups.replica_sets()}
        return result

    def memory(self, optimizer: Any) -> list[int]:
        """Bytes of one optimizer: measured, by the formula, and how many bytes the formula has for a parameter."""
        from megatron.core import mpu

        whole = mpu.get_data_parallel_group(with_context_parallel=True).size()
        copies = whole // mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True).size()
        size = optimizer.data_parallel_group.size() * copies
        measured = replica_bytes.measure(optimizer)
        expected = replica_bytes.expected_of(optimizer, size, copies)
        return [measured.with_padding, expected, measured.numel, size, copies]

    def patches(self) -> list[Patch]:
        """The hooks of this recorder."""
        return [
            Patch(2, "megatron.core.optimizer:get_megatron_optimizer", self.built, "records the optimizer"),
            Patch(2, "megatron.training.training:train_step", self.stepped, "records a step"),
        ]


def main() -> None:
    """Run the script."""
    recorder, manager = Recorder(), PatchManager()
    patches = recorder.patches()
    if LAYOUT == "copies":
        config = read_config([MASTER_FLAG], os.environ)
        patches = [*arguments.patches(config), *validate.patches(config), *replica.patches(config), *patches]
    manager.apply(patches, versions.installed().core)
    sys.path.insert(0, str(Path(SCRIPT).parent))
    runpy.run_path(SCRIPT, run_name="__main__")
    recorder.report["unreached"] = [patch.target for patch in manager.unreached()]
    Path(f"{REPORT}.{os.environ['RANK']}").write_text(json.dumps(recorder.report))


if __name__ == "__main__":
    main()
