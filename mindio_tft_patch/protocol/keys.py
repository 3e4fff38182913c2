"""Keys of the control channel in a file, for jobs whose controller has no store in common with its ranks (TFT_KEYS).

Where the launcher or rank 0 runs the controller it makes keys of its own at every start and passes them on through the
job's store. The controller of a cluster manager runs elsewhere: both sides read the same file there, a mounted secret
as a rule. `mindio-tft keys FILE` writes one.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.endpoint import Endpoint

logger = logging.getLogger("mindio_tft_patch.wire")

_FIELDS = ("server_public", "server_secret", "client_public", "client_secret")
_LENGTH = 40  # of a key in Z85
_PUBLIC = "{}_public"
_SECRET = "{}_secret"


@dataclass(frozen=True)
class Keys:
    """Two CURVE key pairs, in Z85: one of the controller, one that all ranks of the job share.

    Attributes:
        server_secret: None in a copy for ranks, which need not know it.
    """

    server_public: bytes
    server_secret: bytes | None = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @property
    def controller_secret(self) -> bytes:
        """What only the controller needs.

        Raises:
            ConfigError: this is a copy for ranks.
        """
        if self.server_secret is None:
            raise ConfigError("TFT_KEYS: server_secret is missing.", change="The controller needs the whole file.")
        return self.server_secret

    def endpoint(self, address: str, port: int) -> Endpoint:
        """A controller with these keys, for its peers."""
        return Endpoint(address, port, self.server_public, self.client_public, self.client_secret)


def new_keys() -> Keys:
    """Keys that nobody else has."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return Keys(server_public, server_secret, client_public, client_secret)


def write_keys(path: Path, keys: Keys) -> None:
    """Write a key file that only its owner can read.

    Raises:
        ConfigError: there is such a file already, or it cannot be written.
    """
    values = {name: (getattr(keys, name) or b"").decode() for name in _FIELDS}
    text = msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists: a job that runs may be using its keys.", change="Name another file, or delete this one."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", change="Name another file.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)


def read_keys(path: Path) -> Keys:
    """The keys in a file.

    Raises:
        ConfigError: it cannot be read, holds no keys, or others may read it.
    """
    try:
        _check_mode(path)
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except OSError as error:
        problem = f"TFT_KEYS={path} cannot be read: {error.strerror}."
        raise ConfigError(problem, change="Write it with `mindio-tft keys FILE`, or mount the secret.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"TFT_KEYS={path} is no key file ({error}).", change=_WRITE_ANEW) from None
    found = {name: values.get(name, "").encode() for name in _FIELDS}
    for pair in ("server", "client"):
        _check_pair(path, pair, found[_PUBLIC.format(pair)], found[_SECRET.format(pair)])
    if not found["client_secret"]:
        raise ConfigError(f"TFT_KEYS={path}: client_secret is missing.", change=_WRITE_ANEW)
    return Keys(
        server_public=found["server_public"],
        server_secret=found["server_secret"] or None,
        client_public=found["client_public"],
        client_secret=found["client_secret"],
    )


_WRITE_ANEW = "Write a new one with `mindio-tft keys FILE`, and give it to the controller and to all ranks."


def _check_mode(path: Path) -> None:
    found = path.stat()
    if not found.st_mode & stat.S_IRWXO:
        return
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    if found.st_uid != 0 or found.st_mode & stat.S_IWOTH:
        problem = f"TFT_KEYS={path} has mode {mode}: other users could take part in the job with these keys."
        raise ConfigError(problem, change=f"chmod 600 {path}")
    # A mounted secret belongs to root and is 0644 unless defaultMode says otherwise; a container has no other users.
    logger.warning("TFT_KEYS=%s has mode %s: give the secret defaultMode 0400 (0440 with fsGroup).", path, mode)


def _check_pair(path: Path, pair: str, public: bytes, secret: bytes) -> None:
    if len(public) != _LENGTH or len(secret) not in (0, _LENGTH):
        raise ConfigError(f"TFT_KEYS={path}: {pair}_public or {pair}_secret is not a key in Z85.", change=_WRITE_ANEW)
    try:
        fits = not secret or zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(f"TFT_KEYS={path}: {pair}_public and {pair}_secret are no pair.", change=_WRITE_ANEW)


def keys_in_file(config: Config) -> Keys | None:
    """The keys of a job whose controller has no store in common with its ranks; None: its channel is not encrypted.

    Raises:
        ConfigError: the file of TFT_KEYS cannot be used.
    """
    if config.keys_path is not None and config.encrypted:
        return read_keys(config.keys_path)
    logger.warning(
        "The control channel of this job is NOT ENCRYPTED: whoever can reach port %d of the controller can stop or end "
        "the job. Write keys with `mindio-tft keys FILE`, give the file to the controller and to all ranks, and set "
        "TFT_KEYS on both sides.",
        config.port,
    )
    return None


def external_endpoint(config: Config) -> Endpoint:
    """Where a controller is that runs outside the job: PROCESSOR_ADDR, TTP_PORT, TFT_KEYS.

    Raises:
        ConfigError: the file of TFT_KEYS cannot be used.
    """
    keys = keys_in_file(config)
    if keys is None:
        return Endpoint(config.controller_address, config.port)
    return keys.endpoint(config.controller_address, config.port)
