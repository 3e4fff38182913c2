"""`torch_npu.distributed`, of which torch_npu puts `reinit_process_group` into torch.distributed as well."""

from __future__ import annotations

from typing import Any

import torch.distributed

from torch_npu.runtime import runtime


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """Let groups communicate again; None: all of them.

    MindSpeed-LLM asks for all of them first, and then for one after the other. They are connected at the first call,
    so that nothing is left for the others.

    rebuild_link: a process has come back, so that old connections are of no use.
    """
    if group is None:
        runtime.groups.connect_anew(gloo_too=not rebuild_link)
    return group


torch.distributed.reinit_process_group = reinit_process_group  # type: ignore[attr-defined]
