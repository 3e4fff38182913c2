"""The job's own key-value store, as the launchers of the nodes provide and open it.

The first attempt uses the store that torchelastic's rendezvous serves anyway. torchelastic keeps that one over
restarts; ranks of the second attempt would then meet the connection data that their predecessors left in it (gloo
hangs or fails on it). From the second attempt on the launcher of node 0 therefore serves a fresh store on a free port
and passes its address on through torchelastic's rendezvous store.

The rank's side is adaptors.job_store.
"""

from __future__ import annotations

import json
from datetime import timedelta

from torch.distributed import Store, TCPStore

from mindio_tft_patch.errors import ControlError

_ADDRESS_KEY = "mindio_tft_patch/job_store"
_ATTEMPT_KEY = "mindio_tft_patch/attempt"


def agree_on_job_store(
    rendezvous_store: Store, *, leads: bool, attempt: int, first: bool, address: str, port: int
) -> tuple[str, int, TCPStore | None]:
    """Where the ranks of an attempt find the job's store; the same answer on every node.

    Args:
        rendezvous_store: torchelastic's store, shared by the launchers of all nodes.
        leads: this is the launcher of node 0.
        attempt: restarts of the job so far, the same number on every node.
        first: this launcher has not served an attempt before, so that torchelastic's own store is still fresh.
        address: host of torchelastic's own store for ranks.
        port: its port.

    Returns:
        address, port, and on node 0 the server if a fresh one was made; it lives as long as it is kept.

    Raises:
        ControlError: no store can be served, or node 0 did not answer.
    """
    key = f"{_ADDRESS_KEY}/{attempt}"
    server: TCPStore | None = None
    try:
        if leads:
            if not first:
                server = TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
                port = server.port
            rendezvous_store.set(key, json.dumps([address, port]))
            rendezvous_store.set(_ATTEMPT_KEY, str(attempt))
        address, port = json.loads(rendezvous_store.get(key))
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise ControlError(
            f"The launchers of the nodes could not agree on a store for attempt {attempt}: {first_line} "
            "Check that the launcher of the first node still runs."
        ) from None
    return address, port, server


def current_attempt(rendezvous_store: Store) -> int:
    """Restarts of the job so far, as node 0 counts them; for a launcher that comes into a job that runs already."""
    try:
        return int(rendezvous_store.get(_ATTEMPT_KEY)) if rendezvous_store.check([_ATTEMPT_KEY]) else 0
    except RuntimeError:
        return 0  # the store is gone: whoever uses it next says so
