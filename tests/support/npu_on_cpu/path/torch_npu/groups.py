"""Process groups as a job on NPUs has them: those over HCCL, which connect late and anew, and those over gloo.

Here both are gloo. A group that names gloo as its backend stays what it is; any other one stands for a group over HCCL:

- in a process that takes the place of a lost one it is made without connections, as HCCL would leave it;
- `connect_anew` connects all of them, together with every other rank, on the same objects.

Members meet under the name of their group. torch 2.14 makes names with the number of groups that a process has made so
far, and a process that MindSpeed-LLM brings back leaves out those over gloo. So names are made here of a group's ranks,
its kind, and its number among groups like it; those numbers are the same everywhere after each `connect_anew`. What
torch_npu does about this on its own torch was not looked into.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.adaptors.device.connections import hang_up

_SECONDS = 60.0
_PREFIX = "npu-on-cpu/rebuild"
_RETURNED = "mindspeed_llm.core.high_availability.tft_arf_group_repair"
_GLOO, _HCCL = "gloo", "hccl"


class Groups:
    """The groups of this process."""

    def __init__(self) -> None:
        self._kind = ""  # of the group that is being made
        self._numbers: Counter[str] = Counter()
        self._original_make: Any = None

    def install(self) -> None:
        """Watch how groups are made."""
        make, initialise, name = c10d.new_group, c10d.init_process_group, c10d._process_group_name

        def new_group(*args: Any, **kwargs: Any) -> Any:
            self._kind = _GLOO if _GLOO in str(kwargs.get("backend")) else _HCCL
            try:
                return make(*args, **kwargs)
            finally:
                self._kind = ""

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if getattr(sys.modules.get(_RETURNED), "ARF_REBOOT_FLAG", False):
                self._make_unconnected()
            return initialise(*args, **kwargs)

        def group_name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
            theirs = name(ranks, use_hashed_name)
            if not self._kind:
                return theirs
            like = f"{self._kind}-{'-'.join(map(str, ranks))}"
            self._numbers[like] += 1
            return f"{like}-{self._numbers[like]}"

        c10d._process_group_name = group_name
        for module in (dist, c10d):
            module.new_group = new_group
            module.init_process_group = init_process_group

    def connect_anew(self, *, gloo_too: bool) -> None:
        """Connect groups anew, together with all other ranks.

        Args:
            gloo_too: also those that are gloo's on NPUs; nobody has come back.
        """
        if self._original_make is not None:
            c10d._new_process_group_helper, self._original_make = self._original_make, None
        hang_up()
        names = {name: group for group, name in c10d._world.pg_names.items()}
        mine = {name: group for name, group in names.items() if gloo_too or not name.startswith(_GLOO)}
        number, everyone = self._exchange(mine)
        for one in everyone.values():
            self._numbers |= Counter(one["numbers"])  # the larger of the two
        for name in sorted(mine):
            members = [everyone[rank]["handles"].get(name) for rank in dist.get_process_group_ranks(mine[name])]
            if None in members:
                raise RuntimeError(f"HCCL: not every member has the group {name}")
            options = c10d.ReconfigureOptions()
            options.uuid = zlib.crc32(f"{number}/{name}".encode())
            options.handles = members
            options.timeout = timedelta(seconds=_SECONDS)
            mine[name].reconfigure(options).wait()

    def _make_unconnected(self) -> None:
        original = self._original_make = c10d._new_process_group_helper

        def make(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "enable_reconfigure": True, "device_id": None})

        c10d._new_process_group_helper = make

    def _exchange(self, mine: dict[str, Any]) -> tuple[int, dict[int, dict[str, Any]]]:
        """Number of this rebuild, and what each rank has to say."""
        store, size = c10d._get_default_store(), dist.get_world_size()
        # Every rebuild is one of all ranks, so the number of arrivals tells which one it is, also to a rank that has
        # not seen the ones before.
        number = 1 + (int(store.add(f"{_PREFIX}/arrivals", 1)) - 1) // size
        said = {"handles": {n: group.get_reconfigure_handle() for n, group in mine.items()}, "numbers": self._numbers}
        store.set(f"{_PREFIX}/{number}/{dist.get_rank()}", json.dumps(said))
        keys = [f"{_PREFIX}/{number}/{rank}" for rank in range(size)]
        deadline = time.monotonic() + _SECONDS
        while not store.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"HCCL: not all ranks came to rebuild {number}")
            time.sleep(0.01)
        return number, {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}
