"""Where the controller is and how to prove to it that one belongs to the job; passed on through the job's own store.

The store is the rendezvous store that the launcher makes for torch.distributed: whoever can read it belongs to the job.
Key material is never logged: the secret fields are left out of `repr`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from mindio_tft_patch.errors import ControlError, ProtocolError

_KEY = "mindio_tft_patch/endpoint"


@dataclass(frozen=True)
class Endpoint:
    """Address and keys of the control channel.

    Attributes:
        address: host name or address that processors and agents connect to.
        port: TCP port.
        server_public: public key of the controller, 40 Z85 characters; None: the channel is not encrypted.
        client_public: public key that all ranks of this job share.
        client_secret: its secret half.
    """

    address: str
    port: int
    server_public: bytes | None = field(default=None, repr=False)
    client_public: bytes | None = field(default=None, repr=False)
    client_secret: bytes | None = field(default=None, repr=False)

    @property
    def encrypted(self) -> bool:
        """True when the controller takes encrypted and authenticated peers only."""
        return self.server_public is not None


class Store(Protocol):
    """What is needed of the job's store; torch.distributed.TCPStore satisfies it."""

    def set(self, key: str, value: str, /) -> object:
        """Store a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it for as long as the store was told to."""
        ...


def publish(store: Store, endpoint: Endpoint) -> None:
    """Make the endpoint known to every rank and agent of the job."""
    # JSON, because torch's stores take text; msgspec writes bytes as base64.
    store.set(_KEY, msgspec.json.encode(endpoint).decode())


def fetch(store: Store) -> Endpoint:
    """The endpoint that the controller has published; waits as long as the store's own time-out.

    Raises:
        ControlError: nobody has published one.
        ProtocolError: the store holds something else under this key.
    """
    try:
        content = store.get(_KEY)
    except Exception as error:  # each store has its own
        raise ControlError(
            f"The controller of this job cannot be found ({error}). Under ttprun it is in the launcher of node 0; else "
            "rank 0 has to start it, which a program on the SDK's functions does by tft_init_controller and "
            "tft_start_controller."
        ) from error
    try:
        return msgspec.json.decode(content, type=Endpoint)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"The job's store holds no readable endpoint of the controller ({error}); is every node running the "
            "same version of mindio_tft_patch?"
        ) from None
