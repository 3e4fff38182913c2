"""tls_info in its documented form, and what is demanded of the control channel."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch.adaptors.sdk import tls_info
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError

# As in the original's security notes, the colon of full width included.
DOCUMENTED = """
tlsCert: /etc/ssl/certs/cert.pem;
tlsCrlPath: /etc/ssl/crl/;
tlsCaPath: /etc/ssl/ca/;
tlsCaFile: ca_cert_1.pem, ca_cert_2.pem;
tlsCrlFile: crl_1.pem, crl_2.pem;
tlsPk: private key;
tlsPkPwd: private key pwd;
packagePath\uff1a /etc/ssl/
"""


def test_the_documented_form_is_read() -> None:
    assert tls_info.read("tft_call", DOCUMENTED) == {
        "tlsCert": "/etc/ssl/certs/cert.pem",
        "tlsCrlPath": "/etc/ssl/crl/",
        "tlsCaPath": "/etc/ssl/ca/",
        "tlsCaFile": ("ca_cert_1.pem", "ca_cert_2.pem"),
        "tlsCrlFile": ("crl_1.pem", "crl_2.pem"),
        "tlsPk": "private key",
        "tlsPkPwd": "private key pwd",
        "packagePath": "/etc/ssl/",
    }


@pytest.mark.parametrize("empty", ["", "  ", ";;\n;"])
def test_it_may_be_empty(empty: str) -> None:
    assert tls_info.read("tft_call", empty) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "tls_info is NoneType"),
        ({}, "tls_info is dict"),
        ("x" * 20_000, "20000 characters"),
        ("tlsCert", "Write `field: value;`"),
        ("tlsKey: x", "with the fields tlsCaPath"),
        ("tlsCert: a; tlsCert: b", "names tlsCert twice"),
        ("tlsCert: ;", "gives tlsCert no value"),
        ("tlsCert: a; tlsCaFile: b", "lacks tlsCaPath"),
    ],
)
def test_another_form_is_refused_in_words(text: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_info.read("tft_call", text)


def test_what_is_given_is_checked_also_when_tls_is_not_demanded() -> None:
    with pytest.raises(ConfigError):
        tls_info.demand("tft_call", Config(), False, "nonsense")


def test_certificates_are_mapped_to_the_keys_of_the_job_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tls_info.demand("tft_call", Config(), True, DOCUMENTED)
    assert "keys of this job" in caplog.text and "tlsCaFile" in caplog.text
    assert "private key" not in caplog.text


def test_encryption_that_is_demanded_cannot_be_switched_off() -> None:
    with pytest.raises(ConfigError, match="TTP_TLS=0 switches the encryption"):
        tls_info.demand("tft_call", Config(encrypted=False), True, "")
    tls_info.demand("tft_call", Config(encrypted=False), False, "")


def test_under_a_cluster_manager_it_needs_keys_in_a_file() -> None:
    with pytest.raises(ConfigError, match="TFT_KEYS"):
        tls_info.demand("tft_call", Config(controller_external=True), True, "")
    tls_info.demand("tft_call", Config(controller_external=True, keys_path=Path("keys")), True, "")
    tls_info.demand("tft_call", Config(controller_external=True, started_by_ttprun=True), True, "")
