"""The survivors' world: torch.distributed as if the dead ranks had never been there.

Megatron's own save_checkpoint calls barriers, broadcasts and `get_rank() == 0` on the default process group. Inside
`SurvivorsWorld` the default group is a fresh gloo group of the participants, numbered 0..n-1 in ascending order of
their ranks; dead ranks take no part, and none of the job's own groups, which may hold stuck collectives, is used.

The groups are built through the job's store, which must outlive rank 0 (the launcher hosts it). `new_group` is of no
use for that: its group names count the groups that this rank has built, which differs between ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.errors import DumpError, Interrupted

log = logging.getLogger("mindio_tft_patch.dump")

_POLL_SECONDS = 0.01


def no_check() -> None:
    """Nothing interrupts the caller."""


class SurvivorsWorld:
    """Context manager; restores torch.distributed when left, also by an exception.

    Args:
        participants: global ranks, ascending; every one of them must enter.
        attempt: number of the recovery; worlds of different attempts cannot be confused.
        deadline: monotonic seconds at which every wait ends with an error.
        check: called while waiting; raises to give up (a newer command has come).

    Attributes:
        rank: global rank of this process.
        number: rank of this process among the participants.
    """

    # Groups whose destructor must not run; they end with the process.
    _abandoned: ClassVar[list[Any]] = []

    def __init__(
        self,
        participants: Sequence[int],
        *,
        attempt: int,
        deadline: float,
        check: Callable[[], None] = no_check,
    ) -> None:
        self.ranks = tuple(participants)
        self.rank = dist.get_rank()
        if self.rank not in self.ranks:
            raise DumpError(f"rank {self.rank} is not among the participants {self.ranks}")
        self.number = self.ranks.index(self.rank)
        self._deadline = deadline
        self._check = check
        self._name = f"tft-survivors/{attempt}/{'_'.join(map(str, self.ranks))}"
        self._store = c10d._get_default_store()
        self._world: Any = None
        self._groups: list[Any] = []
        self._restore = ExitStack()

    @property
    def leads(self) -> bool:
        """Does this rank do what only one may do?"""
        return self.number == 0

    def remaining_seconds(self) -> float:
        """Time left.

        Raises:
            DumpError: none is.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DumpError("the time for the dump is over")
        return left

    def __enter__(self) -> SurvivorsWorld:
        try:
            self._meet()
            # Numbered like a default group: torch takes "rank 0" of a default group for its first member.
            self._world = self._build("world", self.ranks, {number: number for number in range(len(self.ranks))})
        except BaseException as error:
            self._close(error)
            if isinstance(error, Exception) and not isinstance(error, DumpError):
                raise DumpError(f"the survivors {self.ranks} could not connect to each other: {error}") from error
            raise
        return self

    def group(self, label: str, ranks: Sequence[int]) -> Any:
        """A gloo group of some participants, in the given order; only its members may and must call this.

        Must be called before `swap`, in the same order by all members.
        """
        return self._build(label, tuple(ranks), {rank: position for position, rank in enumerate(ranks)})

    def swap(self) -> None:
        """From here to the end of the block the default group is that of the survivors; collectives may begin."""
        previous = c10d._get_default_group()
        self._restore.callback(_set_default_group, previous)
        _set_default_group(self._world)

        def get_rank(group: Any = None) -> int:
            # The original translates the rank in the default group, which now is not a global one.
            return int((self._world if group is None else group).rank())

        for module in (dist, c10d):
            self._restore.callback(setattr, module, "get_rank", module.get_rank)
            module.get_rank = get_rank

    def gather(self, value: Any) -> list[Any]:
        """The values of all participants, in their order."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._world)
        return values

    def from_leader(self, action: Callable[[], Any]) -> Any:
        """What `action` returned on the leader.

        Raises:
            DumpError: on every participant, when it raised there.
        """
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = action()
            except Exception as error:
                box[1] = f"rank {self.rank}: {error}"
        dist.broadcast_object_list(box, src=0, group=self._world)
        if box[1] is not None:
            raise DumpError(box[1])
        return box[0]

    def report(self, reason: str) -> None:
        """Leave word for the others why this rank gives up; never raises."""
        try:
            self._store.set(f"{self._name}/failed/{self.rank}", reason)
        except Exception as error:
            log.warning("the other ranks could not be told why this rank gives up: %s", error)

    def reports(self, *, patience_seconds: float) -> dict[int, str]:
        """Why other participants gave up, by rank; empty when nobody leaves word in that time."""
        ends = time.monotonic() + patience_seconds
        keys = {rank: f"{self._name}/failed/{rank}" for rank in self.ranks if rank != self.rank}
        try:
            while True:
                found = {rank: key for rank, key in keys.items() if self._store.check([key])}
                if found or time.monotonic() >= ends:
                    return {rank: bytes(self._store.get(key)).decode(errors="replace") for rank, key in found.items()}
                time.sleep(_POLL_SECONDS)
        except Exception as error:
            log.warning("the store does not answer: %s", error)
            return {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None = None) -> None:
        self._restore.close()
        if isinstance(error, Interrupted):
            # A collective is pending. The destructor of a gloo group waits for it, and those of its members for each
            # other, until the group's time-out. All members are being stopped, so nobody needs the wake-up.
            self._abandoned.extend(self._groups)
        # Closing the connections is what wakes participants that wait for this rank.
        for group in reversed(self._groups):
            try:
                dist.destroy_process_group(group)
            except Exception as problem:
                log.warning("a group of the survivors could not be closed: %s", problem)
        self._groups.clear()
        self._world = None

    def _meet(self) -> None:
        # Before any blocking call into gloo: a participant that has died meanwhile must be found with a readable
        # message, and a newer command of the controller must be able to end the wait.
        waiting = [f"{self._name}/here/{rank}" for rank in self.ranks]
        self._store.set(waiting[self.number], "1")
        while not self._store.check(waiting):
            self._check()
            if time.monotonic() >= self._deadline:
                absent = [rank for rank, key in zip(self.ranks, waiting, strict=True) if not self._store.check([key])]
                raise DumpError(f"ranks {absent} did not come to the dump in time")
            time.sleep(_POLL_SECONDS)

    def _build(self, label: str, ranks: tuple[int, ...], numbering: dict[int, int]) -> Any:
        members = "_".join(map(str, ranks))
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(self.rank),
            list(ranks),
            "gloo",
            self._store,
            f"{self._name}/{label}/{members}",
            timeout=timedelta(seconds=self.remaining_seconds()),
        )
        c10d._world.pg_group_ranks[group] = numbering
        self._groups.append(group)
        return group


def _set_default_group(group: Any) -> None:
    update = getattr(c10d, "_update_default_pg", None)
    if update is not None:
        update(group)
    else:
        c10d._world.default_pg = group
