"""The functions by their names: each works on the processor of this process, and says what it raises."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.sdk_rank import as_current, make_processor

from mindio_tft_patch.adaptors.sdk import api, controller, current, old_style, training
from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.enums import Action, ReportState
from mindio_tft_patch.adaptors.sdk.mainline import Verdict
from mindio_tft_patch.adaptors.sdk.processor import Processor
from mindio_tft_patch.errors import ConfigError, ControlError
from mindio_tft_patch.protocol.messages import CommitState, FaultReport, Finished, Welcome
from mindio_tft_patch.protocol.phases import FaultKind, Strategy
from mindio_tft_patch.testing import FakeChannel, plan_for_tests


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel(Welcome(0, True))


@pytest.fixture
def processor(channel: FakeChannel) -> Iterator[Processor]:
    with as_current(make_processor(channel)) as made:
        yield made


@pytest.fixture
def running(processor: Processor) -> Processor:
    api.tft_init_processor(1, 4, False)
    api.tft_start_processor("127.0.0.1", 8000)
    return processor


def test_what_is_raised_is_logged(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError):
        api.tft_init_processor(9, 4, False)
    assert "tft_init_processor: rank is 9" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(TypeError):
        api.REGISTER_FUNCTIONS["tft_register_stop_handler"](5)
    assert "tft_register_stop_handler: func must be callable" in caplog.text


def test_marks_reach_the_processor(running: Processor) -> None:
    api.tft_start_copy_os()
    api.tft_start_updating_os()
    assert running.updates.commit() is None
    api.tft_end_updating_os(7)
    assert running.updates.commit() == CommitState(step=7)
    assert running.attending  # the first update is the latest moment to begin


def test_marks_without_a_processor_do_no_harm(processor: Processor) -> None:
    api.tft_start_updating_os(-1)
    api.tft_end_updating_os(1)
    api.tft_pause_train(1)
    assert not processor.attending


@pytest.mark.parametrize("step", [-1, None, "1"])
def test_a_pause_is_at_a_step(processor: Processor, step: Any) -> None:
    with pytest.raises(ConfigError, match="cur_step"):
        api.tft_pause_train(step)


def test_a_stop_is_noticed_between_two_steps(processor: Processor) -> None:
    processor.updates.forbid("a test wants it")
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        api.tft_pause_train(3)


def test_resetting_the_limit_has_the_next_update_raise(processor: Processor) -> None:
    api.tft_reset_limit_step()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        api.tft_start_updating_os()


def test_whether_this_is_a_reboot_is_known_after_the_start(processor: Processor) -> None:
    with pytest.raises(ControlError, match="tft_is_reboot_node: the processor does not run"):
        api.tft_is_reboot_node()


@pytest.mark.parametrize("returning", [False, True])
def test_a_reboot_is_what_the_controller_calls_one(returning: bool) -> None:
    with as_current(make_processor(FakeChannel(Welcome(0, True, returning=returning)))):
        api.tft_init_processor(1, 4, False)
        api.tft_start_processor("127.0.0.1", 8000)
        assert api.tft_is_reboot_node() is returning
        assert api.tft_get_reboot_type() == "arf"


def test_a_process_that_has_come_back_trains_no_step_before_it_has_a_state() -> None:
    with as_current(make_processor(FakeChannel(Welcome(0, True, returning=True)))):
        api.tft_init_processor(1, 4, False)
        api.tft_start_processor("127.0.0.1", 8000)
        with pytest.raises(RuntimeError, match="ARF FINISH"):
            api.tft_start_updating_os()


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(Strategy.RETRY, "retry"), (Strategy.RESPAWN, "recover"), (Strategy.DUMP, "dump"), (Strategy.EXIT, "unknow")],
)
def test_the_callbacks_can_ask_what_is_being_done(processor: Processor, strategy: Strategy, name: str) -> None:
    assert api.tft_get_repair_type() == "unknow"
    assert api.tft_get_repair_step() == 0
    processor.handlers.state.plan = plan_for_tests(strategy)
    processor.handlers.state.step = 5
    assert api.tft_get_repair_type() == name
    assert api.tft_get_repair_step() == 5


def test_the_framework_is_one_of_two(processor: Processor) -> None:
    assert api.get_mindio_export_version() is None
    with pytest.raises(ConfigError, match="'DeepSpeed' is not known"):
        api.set_mindio_export_version("DeepSpeed")
    for name in ("MindSpeed", "MindSpeed-LLM"):
        api.set_mindio_export_version(name)
        assert api.get_mindio_export_version() == name
    assert processor.options.stops_before_dump


def test_arguments_of_a_step_are_those_of_the_framework(processor: Processor) -> None:
    api.tft_set_step_args(("model", 3))
    assert processor.step_args == ("model", 3)
    api.tft_set_step_args(None)
    assert processor.step_args == ("model", 3)
    processor.updates.forbid("a checkpoint is being written")
    with pytest.raises(RuntimeError, match="checkpoint"):
        api.tft_set_step_args(("other", 4))


def test_mindspeed_needs_none(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    api.set_mindio_export_version("MindSpeed")
    with caplog.at_level(logging.WARNING):
        api.tft_set_step_args(("model", 3))
    assert processor.step_args is None
    assert "not needed for MindSpeed" in caplog.text


def test_update_times_are_those_of_the_functions(processor: Processor) -> None:
    assert not api.tft_can_do_uce_repair(150)
    api.tft_set_update_start_time(100)
    api.tft_set_update_end_time(200)
    assert api.tft_can_do_uce_repair(150)
    assert not api.tft_can_do_uce_repair(50)
    assert api.tft_can_do_uce_repair(50, 10, 20)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (ReportState.RS_NORMAL, FaultKind.COLLATERAL),
        (ReportState.RS_UCE, FaultKind.MEMORY),
        (ReportState.RS_UCE.value, FaultKind.MEMORY),
        (ReportState.RS_UCE_CORRUPTED, FaultKind.MEMORY),
        (ReportState.RS_RETRY, FaultKind.MEMORY),
        (ReportState.RS_HCCL_FAILED, FaultKind.NETWORK),
        (ReportState.RS_STEP_FINISH, FaultKind.EXCEPTION),
        (ReportState.RS_INIT_FINISH, FaultKind.EXCEPTION),
    ],
)
def test_a_report_reaches_the_controller(
    running: Processor, channel: FakeChannel, state: object, kind: FaultKind
) -> None:
    api.tft_report_error(state, "1f")
    report = channel.wait_for(FaultReport)
    assert isinstance(report, FaultReport)
    assert (report.rank, report.kind) == (1, kind)
    assert "device error type 1f" in report.detail


def test_an_unknown_error_waits_until_the_job_ends(running: Processor, channel: FakeChannel) -> None:
    running.begin()
    running.mainline.release(Verdict.LEAVE)
    api.tft_report_error(ReportState.RS_UNKNOWN)
    report = channel.wait_for(FaultReport)
    assert isinstance(report, FaultReport) and report.kind is FaultKind.EXCEPTION


@pytest.mark.parametrize("wrong", [99, "RS_UCE", None])
def test_a_state_is_one_of_the_enumeration(running: Processor, wrong: object) -> None:
    with pytest.raises(ConfigError, match="tft_report_error: error_type"):
        api.tft_report_error(wrong)


def test_nobody_can_be_told_without_a_processor(processor: Processor) -> None:
    with pytest.raises(ControlError, match="tft_report_error: the processor does not run"):
        api.tft_report_error(ReportState.RS_UCE)
    assert api.tft_wait_next_action() == Action.EXIT.value


@pytest.mark.parametrize(
    ("verdict", "action"), [(Verdict.AGAIN, Action.RETRY), (Verdict.LEAVE, Action.EXIT), (Verdict.ALONE, Action.EXIT)]
)
def test_the_next_action_is_what_was_decided(running: Processor, verdict: Verdict, action: Action) -> None:
    running.begin()
    running.mainline.release(verdict)
    assert api.tft_wait_next_action() == action.value


def test_the_end_of_training_is_told_once_and_a_new_processor_can_begin(
    running: Processor, channel: FakeChannel
) -> None:
    api.tft_destroy_processor()
    assert channel.wait_for(Finished)
    assert current.processor() is not running
    api.tft_destroy_processor()
    current.replace(None)


def test_only_something_callable_is_put_under_protection() -> None:
    for decorate in (api.tft_exception_handler, old_style.ttp_to_persist):
        with pytest.raises(TypeError, match="tft_exception_handler: func must be callable"):
            decorate(5)  # type: ignore[type-var]


def test_a_decorated_function_keeps_name_arguments_and_result(processor: Processor) -> None:
    @api.tft_exception_handler
    def train(first: int, *, second: int) -> int:
        """Train."""
        return first * second

    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert train(6, second=7) == 42


def test_without_a_processor_an_exception_passes(processor: Processor) -> None:
    @api.tft_exception_handler
    def train() -> None:
        raise RuntimeError("UCE ERROR")

    with pytest.raises(RuntimeError, match="UCE ERROR"):
        train()


def test_sys_exit_passes_too(running: Processor) -> None:
    @api.tft_exception_handler
    def train() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 3


def test_training_that_has_returned_ends_processor_and_controller(
    running: Processor, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(controller, "tft_destroy_controller", lambda: ended.append("controller"))
    api.tft_exception_handler(lambda: None)()
    assert channel.wait_for(Finished)
    assert ended == []  # of rank 1
    with as_current(make_processor()):
        api.tft_init_processor(0, 1, False)
        api.tft_start_processor("127.0.0.1", 8000)
        api.tft_exception_handler(lambda: None)()
    assert ended == ["controller"]


def test_the_device_is_the_one_of_the_accelerator(processor: Processor) -> None:
    assert api.get_device() is None
    processor.accelerator.index = 3
    assert api.get_device() == 3


class Stream:
    """A stream, and what torch.npu does with it."""


class Npu:
    """torch.npu with one device."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.Stream = Stream

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 5

    def set_device(self, index: int) -> None:
        self.log.append(("set_device", index))

    def stream(self, stream: object) -> Any:
        self.log.append(type(stream).__name__)
        import contextlib

        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        self.log.append("empty_cache")


def test_callbacks_run_on_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = Npu()
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"npu": npu}))  # type: ignore[arg-type]
    accelerator = Accelerator()
    accelerator.use()
    assert npu.log == []
    accelerator.remember()
    assert accelerator.index == 5
    accelerator.use()
    with accelerator.own_stream():
        accelerator.give_memory_back()
    assert npu.log == [("set_device", 5), "Stream", "empty_cache"]


def test_a_device_that_refuses_to_give_memory_back_does_not_end_a_recovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Npu):
        def empty_cache(self) -> None:
            raise RuntimeError("device is broken")

    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"npu": Broken()}))  # type: ignore[arg-type]
    accelerator = Accelerator()
    accelerator.remember()
    accelerator.give_memory_back()
    assert "device is broken" in caplog.text


def test_without_torch_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    accelerator = Accelerator()
    accelerator.remember()
    accelerator.use()
    with accelerator.own_stream():
        accelerator.give_memory_back()
    assert accelerator.index is None


def test_an_error_is_logged_with_the_name_of_the_call_once(caplog: pytest.LogCaptureFixture) -> None:
    with as_current(make_processor()), pytest.raises(ConfigError):
        api.tft_init_processor(-1, 4, False, False)
    assert caplog.text.count("tft_init_processor") == 1


def test_an_update_without_a_processor_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    training._warn_once.cache_clear()
    with as_current(make_processor()):
        for step in (1, 2):
            api.tft_start_updating_os()
            api.tft_end_updating_os(step)
    assert caplog.text.count("the processor does not run") == 1
