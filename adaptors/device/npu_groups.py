"""Process groups of a job on NPUs: HCCL's by torch_npu's reinit_process_group, gloo's as everywhere (regroup.py).

HCCL makes a communicator at the first collective of a group, from what the group's first rank puts into the store. So a
process that has come back needs nothing special: no collective runs in its set-up (unconnected.py answers them), and
its HCCL groups are not connected before the others are ready. `reinit_process_group(group, rebuild_link=True)` destroys
a group's communicator on this rank, if there is one, and deletes its keys from the store; it waits for nobody.

That deletion is why all ranks reinitialise before any of them uses a group again: a rank that came later would delete
what another has just written. The exchange of gloo's handles, which follows, waits for every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.adaptors.device import regroup
from mindio_tft_patch.adaptors.device.cpu_registry import Registry
from mindio_tft_patch.errors import RecoveryError

log = logging.getLogger("mindio_tft_patch.rebuild")

_TORCH_NPU_GROUPS = "torch_npu.distributed.distributed_c10d"


def hccl_groups() -> dict[str, Any]:
    """Groups of this rank that have an HCCL backend, alone or beside gloo; by name."""
    return {name: group for name, group in regroup.groups().items() if "hccl" in c10d._world.pg_map[group][0]}


def gloo_parts(group: Any) -> dict[str, Any]:
    """For regroup: the gloo backend of a group, if it has one."""
    return {
        suffix: backend
        for suffix, backend in regroup.backends(group).items()
        if isinstance(backend, c10d.ProcessGroupGloo)
    }


def reinit_hccl(reinit: Callable[..., Any], *, check: Callable[[], None]) -> int:
    """Have every HCCL group connect anew at its next collective.

    Args:
        reinit: torch_npu.distributed.reinit_process_group.
        check: called between groups; raises to give up.

    Returns:
        Number of groups.

    Raises:
        RecoveryError: the communicator of a group could not be destroyed.
    """
    groups = hccl_groups()
    for name, group in groups.items():
        check()
        try:
            # True also where the old connections may be fine: resuming them (False) needs every member's to be.
            reinit(group, rebuild_link=True)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise RecoveryError("rebuild", f"HCCL group {name} could not be reinitialised: {first_line}") from error
    return len(groups)


def make_gloo_unconnected(registry: Registry) -> None:
    """Have groups that are made from here on leave gloo unconnected, until `registry` is reverted.

    torch_npu replaces torch's way of making a group by its own, which accepts `enable_reconfigure` and does not hand it
    to gloo. A gloo group of a process that has come back would wait for ranks that do not come.
    """
    module = sys.modules.get(_TORCH_NPU_GROUPS)
    if module is None or not hasattr(module, "ProcessGroupGloo"):
        return

    # A class, because torch_npu also asks isinstance().
    class UnconnectedGloo(c10d.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "enable_reconfigure": True})

    registry.set(module, "ProcessGroupGloo", UnconnectedGloo)
