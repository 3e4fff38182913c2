from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.controller.options import options_of
from mindio_tft_patch.errors import ConfigError


def test_without_flags_and_variables_everything_has_its_default() -> None:
    assert read_config([], {}) == Config()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("TTP_PORT", "80"),
        ("TTP_PORT", "port"),
        ("TTP_PORT", "70000"),
        ("TTP_OT", "0"),
        ("TTP_OT", "nan"),
        ("TTP_RETRY_TIMES", "301"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "29"),
        ("TTP_LOG_LEVEL", "LOUD"),
        ("TTP_LOG_MODE", "SOME"),
        ("TTP_LOG_STDOUT", "yes"),
        ("TTP_TLS", "maybe"),
        ("TTP_ADDR", "0.0.0.0"),
        ("CONTROLLER_ADDR", "::"),
        ("PROCESSOR_ADDR", "a b"),
        ("MINDIO_WAIT_MINDX_TIME", "3601"),
        ("TFT_HANG_SECONDS", "-1"),
        ("TFT_RESTART_BUDGET", "100001"),
        ("TFT_RETURN_SECONDS", "0"),
        ("TFT_SCRUB_INTERVAL", "-1"),
        ("TFT_SCRUB_ACTION", "shout"),
        ("HIGH_AVAILABILITY", "fly"),
        ("TTP_PORT", "8" * 5000),
        ("TTP_OT", "8" * 5000),
        ("TFT_HANG_SECONDS", "1e999"),
    ],
)
def test_a_variable_out_of_range_is_replaced_by_its_default_with_a_warning(name: str, bad: str) -> None:
    config = read_config([], {name: bad})
    assert dataclasses.replace(config, warnings=()) == Config()
    assert len(config.warnings) == 1
    assert name in config.warnings[0]


def test_addresses_fall_back_to_the_common_one() -> None:
    config = read_config([], {"TTP_ADDR": "10.0.0.1", "PROCESSOR_ADDR": "[fe80::1]"})
    assert (config.controller_bind, config.controller_address) == ("10.0.0.1", "fe80::1")


def test_a_feature_flag_without_the_master_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-high-availability"):
        read_config(["--enable-worker-reboot"], {})


def test_the_environment_switches_features_on_and_says_so() -> None:
    config = read_config([], {"HIGH_AVAILABILITY": "dump, retry"})
    assert config.high_availability
    assert config.hbmfault_repair
    assert not config.worker_reboot
    assert "HIGH_AVAILABILITY" in config.warnings[0]


def test_without_replica_one_copy_is_kept() -> None:
    flags = ["--enable-high-availability", "--distributed-optimizer-no-replica"]
    assert read_config(flags, {}).copies == 1
    assert read_config(flags[:1], {"TFT_REPLICAS": "3"}).copies == 3


def test_a_log_folder_that_is_a_symbolic_link_is_not_used(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    config = read_config([], {"TTP_LOG_PATH": str(link)})
    assert config.log_path == Path("logs")
    assert "symbolic link" in config.warnings[0]


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--enable-hbmfault-repair", True),
        ("--enable-worker-reboot", True),
        ("--distributed-optimizer-no-replica", True),
        ("--enable-high-availability", False),
    ],
)
def test_recovery_in_place_is_asked_for_by_its_flags(flag: str, wanted: bool) -> None:
    assert read_config(["--enable-high-availability", flag], {}).in_place is wanted


def test_the_controller_takes_its_durations_from_the_configuration() -> None:
    config = read_config([], {"TTP_OT": "33", "TFT_HANG_SECONDS": "7", "TFT_HEARTBEAT_SECONDS": "0.5"})
    again = options_of(read_config([], {"TFT_RESTART_BUDGET": "0", "TFT_RETURN_SECONDS": "40"}), 8)
    assert (again.restart_budget, again.return_seconds) == (0, 40.0)
    options = options_of(config, 8)
    assert (options.world_size, options.dump_timeout_seconds, options.hang_seconds) == (8, 33.0, 7.0)
    assert options.silence_seconds == 1.5


def test_a_log_folder_with_a_name_that_no_file_can_have_gives_way() -> None:
    config = read_config([], {"TTP_LOG_PATH": "x" * 300})
    assert config.log_path == Path("logs")
    assert any("TTP_LOG_PATH cannot be a folder" in warning for warning in config.warnings)
