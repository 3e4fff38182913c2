"""The job's own key-value store, as ranks open it.

The store listens at MASTER_ADDR:MASTER_PORT, where torch.distributed meets too; our keys have a prefix. Who hosts:

- under `ttprun` and `torchrun` the launcher of node 0 (TORCHELASTIC_USE_AGENT_STORE): it outlives every rank, rank 0
  included; all ranks are clients;
- under another launcher rank 0. torch's own TCPStore finds our server in the process and shares it (multi_tenant).

The prefix carries the number of the restart: torchrun keeps one store over all restarts, and a rank of the second
attempt must not find the controller of the first.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError

# Always explicit: torch's default for a store whose host never comes is 30 minutes.
OPEN_SECONDS = 60.0


def prefix(restart_count: int) -> str:
    """What our keys begin with in the job's store."""
    return f"mindio_tft_patch/attempt_{restart_count}"


def connect_job_store(
    address: str, port: int, restart_count: int, *, host: bool = False, timeout_seconds: float = OPEN_SECONDS
) -> Store:
    """Open the store at an address, with our prefix.

    Args:
        host: this process is the one that serves the store.
        timeout_seconds: for the connection and for every get() of a key that nobody has set yet.

    Raises:
        ControlError: nobody serves a store there, or the port cannot be used.
    """
    try:
        store = TCPStore(
            address,
            port,
            None,
            host,
            timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=host,
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ControlError(
            f"The job's store at {address} port {port} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"{'served' if host else 'reached'}: {first} Check that the address is right, that the first node runs, "
            "and that no other program uses the port."
        ) from None
    return PrefixStore(prefix(restart_count), store)


def open_job_store(config: Config, timeout_seconds: float = OPEN_SECONDS) -> Store:
    """The job's store, for a rank. Keep the result: under a foreign launcher rank 0's copy is the server.

    Raises:
        ControlError: nobody serves a store there, or the port cannot be used.
    """
    return connect_job_store(
        config.master_address,
        config.master_port,
        config.restart_count,
        host=not config.agent_store and config.rank == 0,
        timeout_seconds=timeout_seconds,
    )
