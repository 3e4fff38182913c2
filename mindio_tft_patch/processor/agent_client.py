"""The agent's end of the control channel: reports the death of local ranks and hears every command."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from mindio_tft_patch.config import Config
from mindio_tft_patch.processor.link import Channel, Link
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Do, FaultReport, Register, Role, UpMessage
from mindio_tft_patch.protocol.phases import FaultKind
from mindio_tft_patch.protocol.wire import PeerSocket


class AgentClient(Link):
    """Speaks for the agent of one node.

    Args:
        config: addresses, tries and intervals.
        endpoint: where the controller is.
        node: index of the node.
        ranks: global ranks of the processes that this agent has started.
        world_size: ranks of the job.
    """

    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        *,
        node: int,
        ranks: Sequence[int],
        world_size: int,
        connect: Callable[[Endpoint], Channel] = PeerSocket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        register = Register(
            role=Role.AGENT,
            rank=-1,
            world_size=world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            node=node,
            ranks=tuple(ranks),
        )
        super().__init__(config, endpoint, register, connect=connect, clock=clock)
        self._ranks = tuple(ranks)
        self._commands: deque[Do] = deque()

    def report(self, rank: int, kind: FaultKind, detail: str, pid: int = 0) -> None:
        """Something happened to a local rank. pid: the process of the rank that it happened to; 0: the current one."""
        self._post(FaultReport(rank=rank, kind=kind, detail=detail, pid=pid))

    def terminate(self, detail: str) -> None:
        """Somebody asked this agent, and with it its ranks, to end."""
        for rank in self._ranks:
            self.report(rank, FaultKind.TERMINATED, detail)

    def commands(self) -> list[Do]:
        """Commands that have arrived since the last call; does not wait."""
        commands: list[Do] = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def _beat(self) -> UpMessage:
        # An agent has no training to report on: registering again is its sign of life.
        return self._register

    def _obey(self, do: Do) -> None:
        self._commands.append(do)
