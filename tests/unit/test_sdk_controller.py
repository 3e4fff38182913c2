"""The controller's functions of the SDK: ranges, errors, and what they answer when there is nothing to obey."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.sdk import controller
from mindio_tft_patch.adaptors.sdk.controller import Face
from mindio_tft_patch.adaptors.sdk.manager import ACTIONS, call_of
from mindio_tft_patch.controller.events import ReportFaults, ReportResult, ReportStopped, ReportStrategies
from mindio_tft_patch.errors import ConfigError, TftError


@pytest.fixture
def face(tmp_path: Path) -> Iterator[Face]:
    yield Face({"TTP_LOG_PATH": str(tmp_path / "logs")})
    logs.reset()


@pytest.fixture
def module(face: Face, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(controller, "_FACE", face)
    return controller


SIGNATURES = {
    "tft_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
    "tft_start_controller": "(bind_ip, port, enable_tls=True, tls_info='')",
    "tft_destroy_controller": "()",
    "tft_query_high_availability_switch": "()",
    "tft_register_mindx_callback": "(action, func)",
    "tft_notify_controller_stop_train": "(fault_ranks, stop_type='stop', timeout=None)",
    "tft_notify_controller_on_global_rank": "(fault_ranks, time=1)",
    "tft_notify_controller_prepare_action": "(action, fault_ranks=None)",
    "tft_notify_controller_change_strategy": "(strategy, params='')",
    "tft_notify_controller_dump": "()",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_parameters_and_defaults_are_those_of_the_reference(name: str) -> None:
    signature = inspect.signature(getattr(controller, name))
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    assert str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((-2, 4, False), "rank"),
        ((4, 4, False), "rank"),
        ((0.0, 4, False), "rank"),
        ((True, 4, False), "rank"),
        ((0, 0, False), "world_size"),
        ((0, 100_001, False), "world_size"),
        ((0, "4", False), "world_size"),
        ((0, 4, 1), "enable_local_copy"),
        ((0, 4, False, None), "enable_arf"),
        ((0, 4, False, False, "yes"), "enable_zit"),
    ],
)
def test_init_refuses_what_is_out_of_range_and_logs_it(
    module: Any, arguments: tuple[Any, ...], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match=f"tft_init_controller: {names} is"):
        module.tft_init_controller(*arguments)
    assert names in caplog.text


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_init_takes_every_rank_of_the_job_and_the_launcher(module: Any, rank: int) -> None:
    module.tft_init_controller(rank, 4, True, True, True)
    module.tft_init_controller(rank, 4, True)  # again: nothing happens


def test_mindspore_has_no_local_copies_and_no_zit() -> None:
    with pytest.raises(ConfigError, match="MindSpore"):
        Face({"MINDIO_FOR_MINDSPORE": "True"}).init(0, 4, True, False, False)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("0.0.0.0", 8000), "bind_ip"),
        (("::", 8000), "bind_ip"),
        (("", 8000), "bind_ip"),
        ((None, 8000), "bind_ip"),
        (("127.0.0.1", 1023), "port"),
        (("127.0.0.1", 65536), "port"),
        (("127.0.0.1", "8000"), "port"),
        (("127.0.0.1", 8000, 0), "enable_tls"),
        (("127.0.0.1", 8000, True, "tlsCert"), "tls_info"),
    ],
)
def test_start_refuses_what_is_out_of_range(module: Any, arguments: tuple[Any, ...], names: str) -> None:
    module.tft_init_controller(-1, 4, False)
    with pytest.raises(ConfigError, match=names):
        module.tft_start_controller(*arguments)


def test_start_comes_after_init(module: Any) -> None:
    with pytest.raises(TftError, match="Call tft_init_controller first"):
        module.tft_start_controller("127.0.0.1", 8000, False)


@pytest.mark.parametrize(
    ("environ", "rank", "says"),
    [
        ({"TFT_CONTROLLER": "agent"}, 0, "runs in its launcher"),
        ({"MINDX_TASK_ID": "task"}, 0, "runs in its launcher"),
        ({}, 2, "runs in rank 0"),
    ],
)
def test_where_another_process_runs_the_controller_nothing_is_started(
    environ: dict[str, str], rank: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    face = Face(environ)
    face.init(rank, 4, False, False, False)
    with caplog.at_level(logging.INFO):
        face.start("127.0.0.1", 8000, False, "")
    assert says in caplog.text
    assert face._server is None


def test_destroying_what_was_never_started_is_no_error(module: Any) -> None:
    module.tft_destroy_controller()
    module.tft_init_controller(-1, 4, False)
    module.tft_destroy_controller()
    with pytest.raises(TftError):
        module.tft_start_controller("127.0.0.1", 8000, False)


def test_callbacks_have_four_names_and_can_be_called(module: Any) -> None:
    assert [module.tft_register_mindx_callback(action, print) for action in ACTIONS] == [0, 0, 0, 0]
    assert module.tft_register_mindx_callback("report_step", print) == 1
    assert module.tft_register_mindx_callback("report_result", None) == 1


def test_there_is_no_high_availability_without_a_controller(module: Any) -> None:
    assert module.tft_query_high_availability_switch() is False


@pytest.mark.parametrize(
    "order",
    [
        lambda module: module.tft_notify_controller_stop_train({0: 1}),
        lambda module: module.tft_notify_controller_stop_train({}, "pause", 10),
        lambda module: module.tft_notify_controller_on_global_rank({0: 1}),
        lambda module: module.tft_notify_controller_change_strategy("retry"),
        lambda module: module.tft_notify_controller_dump(),
        lambda module: module.tft_notify_controller_prepare_action("hot switch", {0: 1}),
        lambda module: module.tft_notify_controller_prepare_action("stop switch"),
        lambda module: module.tft_notify_controller_prepare_action("new pod running"),
    ],
)
def test_without_a_controller_every_order_is_answered_with_1(module: Any, order: Callable[[Any], int]) -> None:
    assert order(module) == 1


class Obedient:
    """A controller that obeys everything, and notes it."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def order(self, order: Any) -> Any:
        from mindio_tft_patch.controller.events import Answer

        self.orders.append(order)
        return Answer(True)

    def close(self) -> None:
        return None


@pytest.fixture
def obedient(face: Face) -> Obedient:
    face._server = Obedient()  # type: ignore[assignment]
    return face._server  # type: ignore[return-value]


@pytest.mark.parametrize(
    "order",
    [
        lambda module: module.tft_notify_controller_stop_train([0]),
        lambda module: module.tft_notify_controller_stop_train({"0": 1}),
        lambda module: module.tft_notify_controller_stop_train({0: 3}),
        lambda module: module.tft_notify_controller_stop_train({-1: 1}),
        lambda module: module.tft_notify_controller_stop_train({0: 1}, "abort"),
        lambda module: module.tft_notify_controller_stop_train({}, "pause", -1),
        lambda module: module.tft_notify_controller_stop_train({}, "pause", 1.5),
        lambda module: module.tft_notify_controller_on_global_rank({0: 1}, 0),
        lambda module: module.tft_notify_controller_on_global_rank({0: 1}, 3601),
        lambda module: module.tft_notify_controller_on_global_rank(None),
        lambda module: module.tft_notify_controller_change_strategy("downgrade", '{"scale-in-strategy": "DP"}'),
        lambda module: module.tft_notify_controller_change_strategy("upgrade"),
        lambda module: module.tft_notify_controller_change_strategy("migration"),
    ],
)
def test_what_is_out_of_range_or_not_offered_is_answered_with_1(
    module: Any, obedient: Obedient, order: Callable[[Any], int]
) -> None:
    assert order(module) == 1
    assert obedient.orders == []


def test_orders_reach_the_controller_as_they_were_given(module: Any, obedient: Obedient) -> None:
    from mindio_tft_patch.controller.events import Choose, FaultyRanks, PauseTraining, SaveAndExit, StopTraining

    assert module.tft_notify_controller_stop_train({0: 1, 3: 0}) == 0
    assert module.tft_notify_controller_stop_train({}, "pause", 600) == 0
    assert module.tft_notify_controller_stop_train({}, "pause") == 0
    assert module.tft_notify_controller_on_global_rank({0: 1}) == 0
    assert module.tft_notify_controller_on_global_rank({0: 2}, 3600) == 0
    assert module.tft_notify_controller_change_strategy("recover", "") == 0
    assert module.tft_notify_controller_dump() == 0
    assert obedient.orders == [
        StopTraining({0: 1, 3: 0}),
        PauseTraining(600.0),
        PauseTraining(None),
        FaultyRanks({0: 1}, 1),
        FaultyRanks({0: 2}, 3600),
        Choose("recover"),
        SaveAndExit(),
    ]


def test_a_launcher_without_torch_can_import_it() -> None:
    code = "import sys, mindio_tft_patch.adaptors.sdk.controller; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_callbacks_get_plain_dictionaries_lists_and_numbers() -> None:
    calls = [
        call_of(ReportFaults({1: 0})),
        call_of(ReportStopped(0, "all ranks have stopped", {1: 0})),
        call_of(ReportStrategies({1: 0}, ("retry", "exit"))),
        call_of(ReportResult(405, "it failed", {1: 0}, "retry")),
    ]
    assert calls == [
        ("report_fault_ranks", ({1: 0},)),
        ("report_stop_complete", (0, "all ranks have stopped", {1: 0})),
        ("report_strategies", ({1: 0}, ["retry", "exit"])),
        ("report_result", (405, "it failed", {1: 0}, "retry")),
    ]
    assert [type(one) for one in calls[3][1]] == [int, str, dict, str]
