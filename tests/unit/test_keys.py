"""Key files: written for one reader, refused when others may read them or when the keys in them do not fit."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mindio_tft_patch import cli
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol import keys
from mindio_tft_patch.protocol.keys import external_endpoint, new_keys, read_keys, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys.json", new_keys())
    return tmp_path / "keys.json"


@pytest.fixture
def owned_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every file look as if somebody owned it; tests may run as root."""

    def own(uid: int) -> None:
        real = Path.stat

        def stat(self: Path) -> os.stat_result:
            found = list(real(self))
            found[4] = uid
            return os.stat_result(found)

        monkeypatch.setattr(Path, "stat", stat)

    return own


def change(path: Path, **values: str | None) -> None:
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def test_what_is_written_is_read_and_only_the_owner_can(path: Path) -> None:
    read = read_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {len(key or b"") for key in (read.server_public, read.server_secret, read.client_public)} == {40}
    assert set(json.loads(path.read_text())) == {"server_public", "server_secret", "client_public", "client_secret"}


def test_a_file_that_exists_is_not_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists: a job that runs may be using its keys"):
        write_keys(path, new_keys())
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        write_keys(path.parent / "no" / "folder", new_keys())


def test_no_secret_is_shown() -> None:
    made = new_keys()
    assert made.server_secret is not None
    for secret in (made.server_secret, made.client_secret):
        assert secret.decode() not in repr(made)


def test_a_file_that_others_may_read_is_refused(path: Path, owned_by: Callable[[int], None]) -> None:
    owned_by(1000)
    path.chmod(0o640)  # a secret mounted for a group
    read_keys(path)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_keys(path)


def test_a_mounted_secret_of_root_is_only_warned_of(
    path: Path, owned_by: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    owned_by(0)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_keys(path)
    assert "defaultMode 0400" in caplog.text
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="0666"):
        read_keys(path)


def test_a_copy_for_ranks_need_not_have_the_secret_of_the_controller(path: Path) -> None:
    change(path, server_secret=None)
    read = read_keys(path)
    assert read.server_secret is None
    assert read.endpoint("10.0.0.7", 8000).encrypted
    with pytest.raises(ConfigError, match="needs the whole file"):
        _ = read.controller_secret


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"client_secret": None}, "client_secret is missing"),
        ({"server_public": "short"}, "is not a key in Z85"),
        ({"client_public": None}, "is not a key in Z85"),
        ({"server_secret": "short"}, "is not a key in Z85"),
        ({"client_secret": "x" * 40}, "are no pair"),
        ({"client_secret": "\\" * 40}, "are no pair"),
    ],
)
def test_keys_that_do_not_fit_are_refused(path: Path, values: dict[str, str | None], says: str) -> None:
    change(path, **values)
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(path)
    assert "mindio-tft keys" in str(caught.value)


def test_a_file_that_is_missing_or_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "keys.json")
    (tmp_path / "keys.json").write_text("[]")
    (tmp_path / "keys.json").chmod(0o600)
    with pytest.raises(ConfigError, match="is no key file"):
        read_keys(tmp_path / "keys.json")


def test_the_ranks_of_a_cluster_find_the_controller_by_address_and_file(path: Path) -> None:
    environ = {"MINDX_TASK_ID": "task", "PROCESSOR_ADDR": "10.0.0.7", "TTP_PORT": "8123", "TFT_KEYS": str(path)}
    config = read_config([], environ)
    assert config.controller_of_cluster
    found, made = external_endpoint(config), read_keys(path)
    assert (found.address, found.port) == ("10.0.0.7", 8123)
    assert (found.server_public, found.client_public) == (made.server_public, made.client_public)
    assert found.client_secret == made.client_secret


def test_without_a_file_the_channel_is_open_and_that_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not external_endpoint(Config(controller_external=True)).encrypted
    assert "NOT ENCRYPTED" in caplog.text


def test_a_channel_that_is_not_to_be_encrypted_is_not(path: Path) -> None:
    assert not external_endpoint(Config(keys_path=path, encrypted=False)).encrypted


def test_who_runs_the_controller() -> None:
    assert not read_config([], {}).controller_of_cluster
    assert not read_config([], {"TFT_CONTROLLER": "agent"}).controller_of_cluster
    assert not read_config([], {"TFT_CONTROLLER": "agent", "MINDX_TASK_ID": "task"}).controller_of_cluster
    assert read_config([], {"MINDX_TASK_ID": "task"}).controller_of_cluster


def test_the_command_writes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    assert cli.run(["keys", str(path)], {}) == 0
    assert "TFT_KEYS" in capsys.readouterr().out
    read_keys(path)
    assert cli.run(["keys", str(path)], {}) == 1
    assert "exists" in capsys.readouterr().err


def test_the_pairs_are_made_by_the_library_that_uses_them() -> None:
    made = new_keys()
    assert made.server_secret is not None
    assert keys.zmq.curve_public(made.server_secret) == made.server_public
