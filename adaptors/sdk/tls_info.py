"""`tls_info`: read and checked in its documented form, and what it means here.

    tlsCert: /etc/ssl/certs/cert.pem;
    tlsCrlPath: /etc/ssl/crl/;
    tlsCaPath: /etc/ssl/ca/;
    tlsCaFile: ca_cert_1.pem, ca_cert_2.pem;
    ...

The original encrypts its channel with TLS and such certificates. Ours is encrypted with CURVE keys, which the
controller makes for each job and hands out through the job's store, or which a file holds (TFT_KEYS). X.509
certificates cannot take their place, so they are not opened. What a caller demands with `enable_tls=True` is that
nobody can read the channel or join it, and that is what is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError

log = logging.getLogger("mindio_tft_patch.sdk")

REQUIRED = ("tlsCaPath", "tlsCert", "tlsCaFile")
LISTS = ("tlsCaFile", "tlsCrlFile")
FIELDS = (*REQUIRED, "tlsCrlPath", "tlsCrlFile", "tlsPk", "tlsPkPwd", "packagePath")
LENGTH_MAX = 10 * 1024


def read(call: str, tls_info: Any) -> Mapping[str, str | tuple[str, ...]]:
    """The fields of `tls_info`; empty: none were given.

    Raises:
        ConfigError: it has not the documented form.
    """
    if not isinstance(tls_info, str):
        raise ConfigError(f"{call}: tls_info is {type(tls_info).__name__}.", change="Pass a string.")
    if len(tls_info) > LENGTH_MAX:
        raise ConfigError(f"{call}: tls_info has {len(tls_info)} characters; {LENGTH_MAX} are allowed.")
    found: dict[str, str | tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in tls_info.split(";"))):
        # The example in the original's documents has one colon of full width.
        name, colon, value = part.replace("\uff1a", ":", 1).partition(":")
        name, value = name.strip(), value.strip()
        if not colon or name not in FIELDS:
            raise ConfigError(
                f"{call}: tls_info has {part!r}.",
                change=f"Write `field: value;` with the fields {', '.join(FIELDS)}.",
            )
        if name in found:
            raise ConfigError(f"{call}: tls_info names {name} twice.", change="Name each field once.")
        if not value:
            raise ConfigError(
                f"{call}: tls_info gives {name} no value.", change=f"Write `{name}: value;`, or leave it out."
            )
        found[name] = _files(value) if name in LISTS else value
    missing = [name for name in REQUIRED if name not in found]
    if found and missing:
        raise ConfigError(f"{call}: tls_info lacks {', '.join(missing)}.", change="Add what is missing.")
    return found


def demand(call: str, config: Config, enable_tls: bool, tls_info: Any) -> None:
    """Check what a caller wants of the control channel, and say what it gets.

    Raises:
        ConfigError: tls_info has not the documented form, or encryption is demanded and switched off.
    """
    fields = read(call, tls_info)
    if not enable_tls:
        return
    if not config.encrypted:
        raise ConfigError(
            f"{call}: enable_tls=True, but TTP_TLS=0 switches the encryption of the control channel off.",
            change="Unset TTP_TLS, or pass enable_tls=False.",
        )
    if config.controller_of_cluster and config.keys_path is None:
        raise ConfigError(
            f"{call}: enable_tls=True, but no keys are shared with the cluster manager's controller.",
            change="Write keys with `mindio-tft keys FILE` and name the file in TFT_KEYS, or pass enable_tls=False.",
        )
    if fields:
        log.info(
            "%s: the control channel is encrypted with the keys of this job (its store's, or those of TFT_KEYS); "
            "the certificates that tls_info names are not used: %s",
            call,
            ", ".join(fields),
        )


def _files(value: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in value.split(","))))
