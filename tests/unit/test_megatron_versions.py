"""Which Megatron is served, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.megatron.versions import MegatronVersion, check_supported, version_in
from mindio_tft_patch.errors import UnsupportedError

ROOT = Path("site-packages/megatron")


def megatron(version: str, training: Path | None = ROOT / "training") -> MegatronVersion:
    return MegatronVersion(version, ROOT / "core", training)


@pytest.mark.parametrize("version", ["0.12.0", "0.12.1", "0.12.3", "0.17.0", "0.18.0rc1", "0.19.2"])
def test_supported_versions_pass(version: str) -> None:
    check_supported(megatron(version))


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0", "0.16.1", "0.20.0", "1.0.0"])
def test_other_versions_are_refused_by_number(version: str) -> None:
    with pytest.raises(UnsupportedError, match=version):
        check_supported(megatron(version))


def test_a_core_without_training_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"without megatron\.training"):
        check_supported(megatron("0.19.2", training=None))


def test_two_megatrons_in_one_process_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="mixed"):
        check_supported(megatron("0.12.1", training=Path("checkout/megatron/training")))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("MAJOR = 0\nMINOR = 12\nPATCH = 1\nPRE_RELEASE = ''\n", "0.12.1"),
        ('MAJOR = 0\nMINOR = 18\nPATCH = 0\nPRE_RELEASE = "rc3"\n', "0.18.0rc3"),
    ],
)
def test_the_version_is_read_without_an_import(text: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "package_info.py").write_text(text)
    assert version_in(tmp_path) == version


def test_a_version_that_cannot_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be told"):
        version_in(tmp_path)
