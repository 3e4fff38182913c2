"""The life of a processor: what may be called when, and what the controller is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.sdk_rank import PARAMETERS, make_processor

from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.adaptors.sdk.processor import Processor
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError, ControlError
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Finished, Ready, Register, ReplicaSet, Welcome
from mindio_tft_patch.protocol.phases import Strategy
from mindio_tft_patch.testing import FakeChannel, check_handlers

CALLBACKS = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt")


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel(Welcome(0, True))


@pytest.fixture
def processor(channel: FakeChannel) -> Iterator[Processor]:
    made = make_processor(channel)
    yield made
    made.close()


def started(processor: Processor, **changes: Any) -> Processor:
    processor.init(**{**PARAMETERS, **changes})
    processor.start("127.0.0.1", 8000, "")
    return processor


def registers(processor: Processor, *names: str) -> None:
    for name in names:
        processor.register(name, {"func": lambda *ignored: None, "ctx": None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 4}, "tft_init_processor: rank is 4"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 100_001}, "world_size is 100001"),
        ({"enable_local_copy": None}, "enable_local_copy is None"),
        ({"enable_tls": "yes"}, "enable_tls is 'yes'"),
        ({"enable_uce": 1}, "enable_uce is 1"),
        ({"enable_arf": 0}, "enable_arf is 0"),
        ({"enable_zit": ""}, "enable_zit is ''"),
        ({"tls": "nonsense"}, "tls_info has 'nonsense'"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(processor: Processor, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        processor.init(**{**PARAMETERS, **changes})
    processor.init(**PARAMETERS)  # nothing is left of the refused call


def test_it_is_initialised_once(processor: Processor) -> None:
    processor.init(**PARAMETERS)
    with pytest.raises(ConfigError, match="is initialised already"):
        processor.init(**PARAMETERS)
    processor.close()
    processor.init(**PARAMETERS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0.0.0.0", 8000, ""), "master_ip is '0.0.0.0', an all-zero address"),
        (("127.0.0.1", 8000, "::"), "local_ip is '::', an all-zero address"),
        (("", 8000, ""), "master_ip is ''"),
        (("127.0.0.1", 80, ""), "port is 80"),
    ],
)
def test_an_address_that_cannot_be_is_refused(processor: Processor, arguments: tuple[Any, ...], said: str) -> None:
    processor.init(**PARAMETERS)
    with pytest.raises(ConfigError, match=f"tft_start_processor: {said}"):
        processor.start(*arguments)


def test_it_is_started_after_it_was_initialised_and_once(processor: Processor) -> None:
    with pytest.raises(ConfigError, match="Call tft_init_processor first"):
        processor.start("127.0.0.1", 8000, "")
    started(processor)
    with pytest.raises(ConfigError, match="runs already"):
        processor.start("127.0.0.1", 8000, "")


def test_a_controller_that_refuses_is_an_error() -> None:
    refused = make_processor(FakeChannel(Welcome(0, False, reason="another job")), {"TTP_RETRY_TIMES": "1"})
    with pytest.raises(ControlError, match="another job"):
        started(refused)
    assert not refused.started


def test_the_switches_of_the_call_count_and_not_the_flags_of_the_script(processor: Processor) -> None:
    processor.init(**{**PARAMETERS, "enable_uce": False, "enable_arf": True})
    config = processor.config
    assert (config.rank, config.world_size) == (1, 4)
    assert (config.high_availability, config.hbmfault_repair, config.worker_reboot) == (True, False, True)


def test_training_with_fewer_ranks_is_not_promised(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        processor.init(**{**PARAMETERS, "enable_zit": True})
    assert "enable_zit=True has no effect" in caplog.text


def test_mindspore_keeps_no_local_copies() -> None:
    with pytest.raises(ConfigError, match="under MindSpore"):
        make_processor(environ={"MINDIO_FOR_MINDSPORE": "True"}).init(**{**PARAMETERS, "enable_local_copy": True})


def test_the_controller_learns_what_the_rank_holds_and_offers(processor: Processor, channel: FakeChannel) -> None:
    started(processor)
    processor.set_replicas(1, [{"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}])
    registers(processor, *CALLBACKS)
    assert not any(isinstance(message, Ready) for message in channel.sent)
    processor.begin()
    ready = channel.wait_for(Ready)
    assert isinstance(channel.wait_for(Register), Register)
    assert ready == Ready(
        1,
        0,
        (ReplicaSet("dense", (1, 3)),),
        (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP),
        restarts=True,
    )
    check_handlers(processor.handlers, rank=1)


@pytest.mark.parametrize(
    ("uce", "arf", "registered", "offered"),
    [
        (True, True, CALLBACKS, {"retry", "respawn", "reload", "dump"}),
        (True, False, CALLBACKS, {"retry", "reload", "dump"}),
        (False, True, CALLBACKS, {"respawn", "reload", "dump"}),
        (False, False, CALLBACKS, {"dump"}),
        (True, True, ("save_ckpt",), {"dump"}),
        (True, True, (), set()),
        (True, True, ("stop", "clean", "rollback", "save_ckpt"), {"retry", "dump"}),  # a network can be retried
        (True, True, ("stop", "clean", "repair", "rollback"), {"retry", "reload"}),
    ],
)
def test_what_is_offered_depends_on_switches_and_callbacks(
    processor: Processor, uce: bool, arf: bool, registered: tuple[str, ...], offered: set[str]
) -> None:
    started(processor, enable_uce=uce, enable_arf=arf)
    registers(processor, *registered)
    assert {strategy.value for strategy in processor.handlers.strategies()} == offered


@pytest.mark.parametrize(
    ("arf", "registered", "restarts"),
    [(True, CALLBACKS, True), (False, CALLBACKS, False), (True, ("stop", "clean", "repair", "rollback"), False)],
)
def test_a_reload_takes_new_processes_only_where_they_are_allowed_and_can_be_connected(
    processor: Processor, channel: FakeChannel, arf: bool, registered: tuple[str, ...], restarts: bool
) -> None:
    started(processor, enable_uce=True, enable_arf=arf)
    registers(processor, *registered)
    processor.begin()
    ready = channel.wait_for(Ready)
    assert Strategy.RELOAD in ready.strategies
    assert ready.restarts is restarts


def test_what_is_registered_late_is_offered_then(processor: Processor, channel: FakeChannel) -> None:
    started(processor)
    processor.begin()
    registers(processor, "save_ckpt")
    offers = [message.strategies for message in channel.sent if isinstance(message, Ready)]
    assert not offers or offers[0] == ()
    processor.finish()
    offers = [message.strategies for message in channel.sent if isinstance(message, Ready)]
    assert offers[-1] == (Strategy.DUMP,)


def test_a_rank_that_has_named_no_replicas_is_alone_with_its_state(processor: Processor) -> None:
    started(processor)
    assert processor.handlers.replica_sets() == (ReplicaSet("dense", (1,)),)


def test_replicas_of_another_rank_are_refused(processor: Processor) -> None:
    started(processor)
    with pytest.raises(ConfigError, match="tft_init_processor was called for rank 1"):
        processor.set_replicas(2, [{"rank_list": [2], "replica_cnt": 1, "replica_shift": 0}])


def test_the_end_in_good_order_is_told(processor: Processor, channel: FakeChannel) -> None:
    started(processor).begin()
    processor.finish()
    assert channel.wait_for(Finished) == Finished(1)
    assert channel.closed
    processor.finish()


def test_an_end_without_training_is_none_in_good_order(processor: Processor, channel: FakeChannel) -> None:
    started(processor).close()
    assert not any(isinstance(message, Finished) for message in channel.sent)


@pytest.mark.parametrize("ranks", [None, [], (0, 1), ["0"], [True], 3])
def test_the_data_parallel_group_is_a_list_of_ranks(processor: Processor, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="dp_rank_list"):
        processor.set_dp_group(1, ranks)
    processor.set_dp_group(1, [0, 1])


@pytest.mark.parametrize("rank", [-1, 100_000, "1"])
def test_its_rank_is_checked_too(processor: Processor, rank: Any) -> None:
    with pytest.raises(ConfigError, match="tft_set_dp_group_info: rank"):
        processor.set_dp_group(rank, [0, 1])


@pytest.mark.parametrize("step", [-1, None, 1.5])
def test_the_step_of_a_checkpoint_is_no_negative_number(processor: Processor, step: Any) -> None:
    with pytest.raises(ConfigError, match="tft_report_load_ckpt_step: step"):
        processor.report_loaded(step)
    processor.report_loaded(0)


def test_a_decryptor_may_be_none_as_in_the_original(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    processor.register("decrypt", {"decryptor": None})
    assert processor.callbacks.get("decrypt") is None
    with caplog.at_level(logging.INFO):
        processor.register("decrypt", {"decryptor": str})
    assert "will not be called" in caplog.text
    with pytest.raises(TypeError):
        processor.register("decrypt", {"decryptor": 5})


def test_rows_for_exceptions_get_into_the_table(processor: Processor) -> None:
    row = {"fault_pattern": "LINK 7", "fault_type": "RS_HCCL_FAILED", "fault_handle": lambda message: "LINK 7"}
    processor.register("exception", row)
    assert processor.patterns.report_of(RuntimeError("LINK 7")).state is ReportState.RS_HCCL_FAILED


@pytest.mark.parametrize(("uce", "state"), [(True, ReportState.RS_UCE), (False, ReportState.RS_UNKNOWN)])
def test_the_switch_for_retries_reaches_the_table(processor: Processor, uce: bool, state: ReportState) -> None:
    started(processor, enable_uce=uce)
    assert processor.patterns.report_of(RuntimeError("UCE ERROR")).state is state


def test_a_process_that_takes_the_place_of_a_lost_one_knows_it() -> None:
    channel = FakeChannel(Welcome(1, True, returning=True))
    processor = started(make_processor(channel))
    assert processor.returning
    processor.begin()  # it has no state yet: its training thread must arrive first
    assert not processor.attending
    processor.close()


@pytest.mark.parametrize(
    ("environ", "here"),
    [
        ({}, True),
        ({"TFT_CONTROLLER": "agent"}, False),
        ({"MINDX_TASK_ID": "7"}, False),
    ],
)
def test_the_controller_runs_in_rank_0_unless_a_launcher_has_it(environ: dict[str, str], here: bool) -> None:
    processor = make_processor(environ=environ)
    assert not processor.hosts_controller
    processor.init(**{**PARAMETERS, "rank": 0, "enable_tls": False})
    assert processor.hosts_controller is here
    other = make_processor(environ=environ)
    other.init(**{**PARAMETERS, "enable_tls": False})
    assert not other.hosts_controller


def test_where_the_controller_is_comes_from_the_call() -> None:
    asked: list[tuple[str, int]] = []

    def find(config: Config, address: str, port: int) -> Endpoint:
        asked.append((address, port))
        return Endpoint(address, port)

    processor = make_processor()
    processor._find = find
    processor.init(**PARAMETERS)
    processor.start("[fd00::1]", 9000, "10.0.0.2")
    assert asked == [("fd00::1", 9000)]
    processor.close()


def test_sigterm_is_told_to_the_controller_and_has_its_effect_without_one(
    processor: Processor, channel: FakeChannel
) -> None:
    assert not processor.on_sigterm()
    started(processor).begin()
    assert processor.on_sigterm()


def test_under_a_cluster_manager_sigterm_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    processor = make_processor(environ={"MINDX_TASK_ID": "7"})
    started(processor, enable_tls=False).begin()
    with caplog.at_level(logging.WARNING):
        assert processor.on_sigterm()
    assert "SIGTERM is ignored" in caplog.text
    processor.close()


@pytest.mark.parametrize(
    ("environ", "rank", "arf", "warned"),
    [
        ({}, 0, True, True),
        ({}, 1, True, False),  # one of them says it for all
        ({}, 0, False, False),
        ({"TFT_CONTROLLER": "agent"}, 0, True, False),
        ({"MINDX_TASK_ID": "7", "TTP_TLS": "0"}, 0, True, False),
    ],
)
def test_where_nobody_starts_processes_anew_the_switch_for_it_is_warned_of(
    caplog: pytest.LogCaptureFixture, environ: dict[str, str], rank: int, arf: bool, warned: bool
) -> None:
    processor = make_processor(environ=environ)
    with caplog.at_level(logging.WARNING, "mindio_tft_patch"):
        processor.init(**{**PARAMETERS, "rank": rank, "enable_arf": arf, "enable_tls": False})
    assert ("nobody starts lost processes anew" in caplog.text) is warned
    processor.close()
