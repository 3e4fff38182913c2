"""The launcher's place on the control channel: node 0 runs the controller, every node an agent's client."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.distributed import Store

from mindio_tft_patch.config import Config
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.agent_client import AgentClient
from mindio_tft_patch.protocol.endpoint import Endpoint, fetch, publish
from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import FaultKind

log = logging.getLogger("mindio_tft_patch.launch")

_AWARE_KEY = "ranks_have_registered"
_LOOK_SECONDS = 2.0  # a launcher that runs looks at least this often
_ADDRESS_VARIABLES = ("TTP_ADDR", "CONTROLLER_ADDR", "PROCESSOR_ADDR")


@dataclass(frozen=True)
class Place:
    """Where this launcher is in the job.

    Attributes:
        node: index of this node; node 0 runs the controller.
        nodes: how many there are.
        ranks: global ranks of this node.
        world_size: ranks of the job.
        address: host of node 0, as the rendezvous names it.
    """

    node: int
    nodes: int
    ranks: tuple[int, ...]
    world_size: int
    address: str


class _WakingClient(AgentClient):
    """An agent's client that says when a command has come, so that nobody has to poll."""

    wake: Callable[[], None]

    def _obey(self, do: Do) -> None:
        super()._obey(do)
        self.wake()


class Control:
    """This launcher's connection to the controller, and on node 0 the controller itself.

    Args:
        store: the job's store (adaptors.job_store).
        silence_seconds: the controller counts as lost after being silent for so long.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        client: AgentClient,
        server: ControllerServer | None,
        silence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._client = client
        self._server = server
        self._silence_seconds = silence_seconds
        self._aware = False
        self._clock = clock
        self._looked_at = clock()
        self._silent_seconds = 0.0

    @property
    def attempt(self) -> int:
        """Number of the controller's current recovery; 0 before the first."""
        return self._client.attempt

    def aware(self) -> bool:
        """Whether any rank has registered, so that somebody can act on a fault.

        Node 0 knows from its controller and leaves a mark in the store for the launchers of the other nodes.
        """
        if self._aware:
            return True
        if self._server is not None:
            self._aware = self._server.registered() > 0
            if self._aware:
                self._store.set(_AWARE_KEY, "1")
        else:
            try:
                self._aware = bool(self._store.check([_AWARE_KEY]))
            except RuntimeError:
                return False  # the store is gone, and node 0 with it: nobody can act
        return self._aware

    def report_death(self, rank: int, detail: str, pid: int = 0) -> None:
        """A rank of this node has died. pid: its process; 0: it has none, because none could be started."""
        self._client.report(rank, FaultKind.PROCESS_DEATH, detail, pid)

    def terminate(self, detail: str) -> None:
        """Somebody asked this launcher to end the job."""
        if self._server is not None:
            self._server.terminate(detail)
        else:
            self._client.terminate(detail)

    def commands(self) -> list[Do]:
        """Commands received since the last call."""
        return self._client.commands()

    def lost(self) -> str:
        """Why the controller cannot be heard any more; empty: all is well."""
        now = self._clock()
        # A launcher that was stopped itself (SIGSTOP, a machine that sleeps) has not listened all that time.
        self._silent_seconds += min(now - self._looked_at, _LOOK_SECONDS)
        self._looked_at = now
        if self._client.connected or (self._server is not None and self._server.alive):
            self._silent_seconds = 0.0
        if self._silent_seconds <= self._silence_seconds:
            return ""
        return (
            f"the controller has been silent for {self._silent_seconds:.0f} s: the launcher of node 0, or the network "
            "to it, is gone"
        )

    def close(self) -> None:
        """Leave the channel; on node 0 end the controller."""
        self._client.close()
        if self._server is not None:
            self._server.close()


def with_address(config: Config, place: Place, environ: Mapping[str, str]) -> Config:
    """The configuration with an address that other nodes can reach.

    TTP_ADDR is 127.0.0.1 unless set; a job of several nodes then takes the address of node 0 that the rendezvous uses.
    """
    if place.nodes == 1 or any(environ.get(name) for name in _ADDRESS_VARIABLES):
        return config
    return replace(config, controller_bind=place.address, controller_address=place.address)


def open_control(config: Config, store: Store, place: Place, wake: Callable[[], None]) -> Control:
    """Start the controller where that is this launcher's part, and connect to it.

    Args:
        wake: called on the client's thread when a command has come.

    Raises:
        ControlError: the port or address cannot be used, or the controller cannot be reached.
        ConfigError: the job has no world size yet.
    """
    if place.world_size < 1:
        raise ConfigError("The rendezvous gave the job no ranks.", change="Check --nnodes and --nproc-per-node.")
    server: ControllerServer | None = None
    if place.node == 0:
        server = ControllerServer(config, place.world_size)
        publish(store, server.start())
    endpoint: Endpoint = fetch(store)
    client = _WakingClient(config, endpoint, node=place.node, ranks=place.ranks, world_size=place.world_size)
    client.wake = wake
    try:
        client.start()
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Control(store, client, server, config.dump_timeout_seconds)
