"""Clients of the SDK's functions against a real controller: who calls which callback, where, and with what."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import wire
from support.sdk_job import IN_PLACE_CALLBACKS, Gate, MemoryStore, Options, Rank
from support.wire import controller, fast_config

from mindio_tft_patch.adaptors.sdk import training
from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.controller.events import Choose, PauseTraining, Report
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.processor.agent_client import AgentClient
from mindio_tft_patch.processor.guard import EXIT_CODE
from mindio_tft_patch.protocol.phases import FaultKind

CONTROL = "mindio-tft-callbacks"
SAVE = "mindio-tft-save"
eventually = functools.partial(wire.eventually, seconds=30.0)
SEND, HIGH, LOW, RECEIVE, LOAD, LOAD_REBUILD = 0, 1, 2, 3, 5, 6


class Job:
    """A controller, an agent where wanted, and ranks in threads."""

    def __init__(self, options: list[Options], agent: bool, caplog: pytest.LogCaptureFixture, kind: type[Rank]) -> None:
        self.kind = kind
        self.options, self.size, self.caplog = options, len(options), caplog
        self.config = fast_config()
        self.store, self.gate = MemoryStore(), Gate(len(options))
        self.with_agent = agent
        self.server: ControllerServer
        self.agent: AgentClient
        self.ranks: list[Rank] = []
        self.former: list[Rank] = []

    @contextmanager
    def running(self) -> Iterator[Job]:
        with self.caplog.at_level(logging.INFO), controller(self.config, self.size) as (self.server, self.endpoint):
            if self.with_agent:
                self.agent = AgentClient(
                    self.config, self.endpoint, node=0, ranks=tuple(range(self.size)), world_size=self.size
                )
                self.agent.start()
            self.ranks = [self.starts(rank, one) for rank, one in enumerate(self.options)]
            try:
                yield self
            finally:
                for one in [*self.ranks, *self.former]:
                    one.ends()
                if self.with_agent:
                    self.agent.close()

    def starts(self, rank: int, options: Options) -> Rank:
        made = self.kind(self.config, self.endpoint, rank, self.size, options, store=self.store, gate=self.gate)
        return made.start()

    def dies(self, rank: int) -> None:
        self.ranks[rank].dies()
        self.agent.report(rank, FaultKind.PROCESS_DEATH, "signal 9")

    def comes_back(self, rank: int) -> Rank:
        self.former.append(self.ranks[rank])
        self.ranks[rank] = self.starts(rank, Options(callbacks=IN_PLACE_CALLBACKS))
        return self.ranks[rank]

    def goes_on(self) -> None:
        """Every rank completes some more steps."""
        last = max(rank.step for rank in self.ranks)
        eventually(lambda: all(rank.step > last + 2 for rank in self.ranks))

    def ends(self) -> list[Any]:
        """Every rank's training thread has left; with what."""
        for rank in self.ranks:
            rank.thread.join(15)
        return [rank.ended for rank in self.ranks]


@contextmanager
def job(
    caplog: pytest.LogCaptureFixture, *options: Options, agent: bool = True, kind: type[Rank] = Rank
) -> Iterator[Job]:
    with Job(list(options), agent, caplog, kind).running() as running:
        yield running


class Listener:
    """A cluster manager that only listens."""

    def tell(self, report: Report) -> None:
        return


def memory_fault() -> RuntimeError:
    return RuntimeError("UCE ERROR: device error type 1a")


def test_a_memory_fault_is_repaired_through_the_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(faults={5: memory_fault()})) as running:
        eventually(lambda: running.ranks[1].entered == 2)
        running.goes_on()
        healthy, broken = running.ranks
        for rank in running.ranks:
            assert rank.order == ["stop", "clean", "repair", "rollback"]
            assert {call.thread for call in rank.calls} == {CONTROL}
            assert rank.accelerator.given_back == [True, False]  # after clean, and before training goes on
            args = list(rank.arguments)
            assert rank.named("stop")[0].arguments == (args, "context of stop")
            assert rank.named("rollback")[0].arguments == (4, args, "context of rollback")
        assert healthy.named("clean")[0].arguments[0] is False
        assert broken.named("clean")[0].arguments[0] is True
        units = {"type": [0], "src": [0], "dst": [1], "rank_list": [0, 1]}
        step, need_rebuild, error_ranks, info, _, context = healthy.named("repair")[0].arguments
        assert (step, need_rebuild, error_ranks, context) == (4, False, [1], "context of repair")
        assert info == {**units, "repair_type": SEND}
        step, need_rebuild, error_ranks, info, _, _ = broken.named("repair")[0].arguments
        assert (step, need_rebuild, error_ranks) == (4, True, [1])
        assert info == {**units, "repair_type": HIGH}
        assert broken.processor.handlers.state.step == 4
        assert "device error type 1a" in caplog.text


def test_a_clean_callback_that_returns_2_spares_the_rebuild(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(faults={3: memory_fault()}, clean_returns=2)) as running:
        eventually(lambda: running.ranks[1].entered == 2)
        _, need_rebuild, _, info, _, _ = running.ranks[1].named("repair")[0].arguments
        assert (need_rebuild, info["repair_type"]) == (False, LOW)


def test_a_clean_callback_that_fails_ends_the_retry(caplog: pytest.LogCaptureFixture) -> None:
    options = {"enable_arf": False}
    with job(caplog, Options(**options), Options(faults={3: memory_fault()}, clean_returns=1, **options)) as running:
        assert all(isinstance(ended, SystemExit) for ended in running.ends())
        assert "the clean callback returned 1" in caplog.text
        assert [call.arguments[0] for call in running.ranks[0].named("save_ckpt")] == [2]


def test_after_a_broken_connection_nothing_is_repaired(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(faults={5: RuntimeError("HCCS LINK ERROR")})) as running:
        eventually(lambda: running.ranks[1].entered == 2)
        running.goes_on()
        assert [rank.order for rank in running.ranks] == [["stop", "clean", "rollback"]] * 2
        assert running.ranks[1].named("clean")[0].arguments[0] is False


def test_a_new_process_takes_the_place_of_a_lost_one(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options()) as running:
        running.goes_on()
        survivor = running.ranks[0]
        assert not survivor.processor.returning
        running.dies(1)
        eventually(lambda: "waiting for rank 1 to come back" in caplog.text)
        newcomer = running.comes_back(1)
        running.goes_on()
        assert survivor.order == ["stop", "clean", "rebuild_group", "repair", "rollback"]
        assert newcomer.order == ["rebuild_group", "repair", "rollback"]
        assert newcomer.entered == 2  # ARF FINISH, then training
        for rank in running.ranks:
            fault_ranks, args, _ = rank.named("rebuild_group")[0].arguments
            assert (fault_ranks, args) == ([1], list(rank.arguments))
            assert {call.thread for call in rank.calls} == {CONTROL}
        assert survivor.named("repair")[0].arguments[3]["repair_type"] == SEND
        _, need_rebuild, error_ranks, info, _, _ = newcomer.named("repair")[0].arguments
        assert (need_rebuild, error_ranks, info["repair_type"]) == (False, [1], RECEIVE)
        assert not newcomer.processor.returning


def test_a_rank_that_fails_on_its_way_back_is_started_once_more(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options()) as running:
        running.goes_on()
        running.dies(1)
        eventually(lambda: "waiting for rank 1 to come back" in caplog.text)
        running.former.append(running.ranks[1])
        broken = running.ranks[1] = running.starts(1, Options(framework="nobody's"))
        eventually(lambda: broken.ended is not None)
        assert isinstance(broken.ended, Exception)
        eventually(lambda: caplog.text.count("waiting for rank 1 to come back") == 2)
        running.comes_back(1)
        running.goes_on()


def test_an_exception_leads_to_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(faults={5: ValueError("Other ERROR")})) as running:
        ended = running.ends()
        assert isinstance(ended[0], SystemExit) and ended[0].code == EXIT_CODE
        assert isinstance(ended[1], ValueError)  # as it was raised, when the checkpoint was written
        healthy, failed = running.ranks
        assert healthy.order == ["stop", "clean", "save_ckpt", "rename"]
        assert failed.order == ["stop", "clean"]
        saved, renamed = healthy.named("save_ckpt")[0], healthy.named("rename")[0]
        assert saved.arguments == (4, [{"type": 0, "ranks": [0]}], list(healthy.arguments), "context of save_ckpt")
        assert (saved.thread, renamed.thread) == (SAVE, CONTROL)
        assert renamed.arguments == (4, list(healthy.arguments))
        eventually(lambda: "; checkpoint the place that the save_ckpt callback has chosen" in caplog.text)


def shared_by_two(*types: int) -> list[dict[str, Any]]:
    return [{"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0} for _ in types]


def test_ranks_that_hold_everything_together_save_and_the_first_renames_when_all_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = [Options(replicas=shared_by_two(0, 1)) for _ in range(3)]
    with job(caplog, *plain, Options(replicas=shared_by_two(0, 1), faults={5: ValueError("broken")})) as running:
        gate = threading.Event()
        running.ranks[1]._save_ckpt = lambda *ignored: gate.wait(10)  # type: ignore[attr-defined]
        eventually(lambda: running.ranks[0].named("save_ckpt") and running.ranks[1].named("save_ckpt"))
        assert not running.ranks[0].named("rename")
        gate.set()
        running.ends()
        both = [{"type": 0, "ranks": [0, 1]}, {"type": 1, "ranks": [0, 1]}]
        assert [call.arguments[1] for rank in running.ranks[:2] for call in rank.named("save_ckpt")] == [both, both]
        assert [rank.order.count("rename") for rank in running.ranks] == [1, 0, 0, 0]
        assert [rank.order.count("save_ckpt") for rank in running.ranks] == [1, 1, 0, 0]


def test_a_save_that_fails_is_tried_again_by_others(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(), Options(faults={5: ValueError("broken")})) as running:

        def full(*ignored: Any) -> None:
            raise OSError("no space left on device")

        running.ranks[0]._save_ckpt = full  # type: ignore[attr-defined]
        running.ends()
        assert [rank.order.count("save_ckpt") for rank in running.ranks] == [1, 1, 0]
        assert [rank.order.count("rename") for rank in running.ranks] == [0, 1, 0]
        assert "save_ckpt failed: OSError: no space left on device" in caplog.text


@pytest.mark.parametrize("framework", ["", "MindSpeed"])
def test_a_checkpoint_is_written_while_a_training_thread_is_stuck(
    caplog: pytest.LogCaptureFixture, framework: str
) -> None:
    callbacks = ("save_ckpt", "rename")
    options = {"callbacks": callbacks, "framework": framework, "enable_uce": False, "enable_arf": False}
    with job(caplog, Options(**options), Options(**options)) as running:
        running.goes_on()
        running.dies(1)
        survivor = running.ranks[0]
        eventually(lambda: survivor.named("rename"))
        assert survivor.order == ["save_ckpt", "rename"]
        assert survivor.thread.is_alive()  # it waits for a rank that is gone
        eventually(lambda: survivor.deaths)
        assert survivor.deaths == [EXIT_CODE]


def test_without_switch_training_is_not_stopped_before_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(framework=""), Options(framework="", faults={4: ValueError("broken")})) as running:
        eventually(lambda: running.ranks[0].named("rename"))
        assert running.ranks[0].order == ["save_ckpt", "rename"]
        # Whoever trains on cannot change what is being saved.
        running.gate.forget()
        with pytest.raises(RuntimeError, match="FORCE STOP"):
            training.start_updating(running.ranks[0].processor, -1)


def alone(rank: int) -> list[dict[str, Any]]:
    return [{"rank_list": [rank], "replica_cnt": 1, "replica_shift": 0}]


def test_without_a_copy_all_ranks_load_the_last_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    first = Options(replicas=alone(0), loads=2)
    second = Options(replicas=alone(1), loads=2, faults={5: memory_fault()})
    with job(caplog, first, second) as running:
        eventually(lambda: running.ranks[1].entered == 2)
        running.goes_on()
        for rank, (kind, rebuild) in enumerate([(LOAD, False), (LOAD_REBUILD, True)]):
            one = running.ranks[rank]
            assert one.order[-4:] == ["stop", "clean", "repair", "rollback"]
            _, need_rebuild, error_ranks, info, _, _ = one.named("repair")[0].arguments
            assert (need_rebuild, error_ranks) == (rebuild, [rank])
            assert info == {"type": [0], "repair_type": kind, "src": [rank], "dst": [rank], "rank_list": [0, 1]}
            assert one.named("rollback")[0].arguments[0] == 2
        eventually(lambda: "recovery over: reload" in caplog.text)


def test_a_memory_fault_that_went_into_the_gradients_is_not_repaired_from_a_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = RuntimeError("HBM MULTI BIT ECC, time us=50")
    with job(caplog, Options(loads=2), Options(loads=2, faults={5: error})) as running:
        running.ranks[1].processor.times.set_start(60)
        running.ranks[1].processor.times.set_end(70)
        eventually(lambda: running.ranks[1].entered == 2)
        assert running.ranks[0].named("repair")[0].arguments[3]["repair_type"] == LOAD
        assert "HBM MULTI BIT ECC can't repair" in caplog.text
        running.goes_on()
        assert {strategy.value for strategy in running.ranks[1].processor.handlers.strategies()} > {"retry"}


def test_such_a_fault_without_a_checkpoint_ends_the_job_and_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("HBM MULTI BIT ECC without a time")
    with job(caplog, Options(), Options(faults={5: error})) as running:
        running.ends()
        assert not running.ranks[0].named("save_ckpt") and not running.ranks[1].named("save_ckpt")


def test_dense_and_expert_state_come_from_different_ranks(caplog: pytest.LogCaptureFixture) -> None:
    def replicas(rank: int) -> list[dict[str, Any]]:
        dense = {"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}
        pair = [rank & 2, (rank & 2) + 1]
        return [dense, {"rank_list": pair, "replica_cnt": 2, "replica_shift": 0}]

    options = [Options(replicas=replicas(rank)) for rank in range(4)]
    options[3].faults = {5: memory_fault()}
    with job(caplog, *options) as running:
        eventually(lambda: running.ranks[3].entered == 2)
        infos = {rank.rank: call.arguments[3] for rank in running.ranks for call in rank.named("repair")}
        assert infos == {
            1: {"type": [0], "repair_type": SEND, "src": [1], "dst": [3], "rank_list": [1, 2, 3]},
            2: {"type": [1], "repair_type": SEND, "src": [2], "dst": [3], "rank_list": [1, 2, 3]},
            3: {"type": [0, 1], "repair_type": HIGH, "src": [1, 2], "dst": [3, 3], "rank_list": [1, 2, 3]},
        }


def test_a_second_fault_frees_a_blocked_callback(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options(faults={5: memory_fault()})) as running:
        survivor, broken = running.ranks
        blocked = threading.Event()

        def wait_for_the_other(*ignored: Any) -> None:
            blocked.set()
            survivor.stopped.wait(20)
            raise RuntimeError("FORCE STOP in a callback")

        survivor._repair = wait_for_the_other  # type: ignore[method-assign]
        broken._repair = lambda *ignored: blocked.wait(20)  # type: ignore[method-assign,assignment]
        eventually(blocked.is_set)
        del survivor._repair
        running.dies(1)
        eventually(lambda: "waiting for rank 1 to come back" in caplog.text)
        running.comes_back(1)
        running.goes_on()
        assert survivor.order.count("stop") >= 2


def test_an_interrupted_update_with_a_copy_of_before_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    options = [Options(local_copy=True, replicas=alone(0)), Options(local_copy=True, replicas=alone(1))]
    with job(caplog, *options) as running:
        running.goes_on()
        running.ranks[1].fails_in_update = RuntimeError("UB LINK ERROR")
        eventually(lambda: running.ranks[1].entered == 2)
        running.goes_on()
        eventually(lambda: "recovery over: retry" in caplog.text)


def test_an_interrupted_update_without_a_copy_is_filled_from_a_replica(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options()) as running:
        running.goes_on()
        running.ranks[1].fails_in_update = RuntimeError("SUSPECT REMOTE ERROR")
        eventually(lambda: running.ranks[1].entered == 2)
        running.goes_on()
        # Its state is half done, though its memory is sound.
        _, need_rebuild, error_ranks, info, _, _ = running.ranks[1].named("repair")[0].arguments
        assert (need_rebuild, error_ranks, info["repair_type"]) == (False, [1], RECEIVE)


def test_training_holds_between_two_steps_when_the_manager_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(), Options()) as running:
        running.goes_on()
        running.server.attach(Listener())
        assert running.server.order(PauseTraining(None)).obeyed
        eventually(lambda: all(rank.named("stream_sync") for rank in running.ranks))
        held = [rank.step for rank in running.ranks]
        assert held[0] == held[1]
        assert all(rank.named("stream_sync")[0].thread == CONTROL for rank in running.ranks)
        assert all(rank.named("stream_sync")[0].arguments == () for rank in running.ranks)
        eventually(lambda: running.server.order(Choose("continue")).obeyed)
        running.goes_on()


def test_a_decorator_of_ones_own_reports_and_waits(caplog: pytest.LogCaptureFixture) -> None:
    class OwnDecorator(Rank):
        def _run(self) -> None:
            while not self.over.is_set():
                try:
                    self._train(*self.arguments)
                except RuntimeError as error:
                    if self.over.is_set():
                        break
                    state = ReportState.RS_HCCL_FAILED if "LINK" in str(error) else ReportState.RS_NORMAL
                    training.report_error(self.processor, state, "")
                    if training.wait_next_action(self.processor) == 1:
                        break
                except SystemExit:
                    break

    options = Options(framework=""), Options(framework="", faults={5: RuntimeError("UB LINK ERROR")})
    with job(caplog, *options, kind=OwnDecorator) as running:
        eventually(lambda: all(rank.entered == 2 and rank.step > 8 for rank in running.ranks))
        assert [rank.order for rank in running.ranks] == [["stop", "clean", "rollback"]] * 2


def test_a_job_that_returns_has_left_in_good_order(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog, Options(steps=5), Options(steps=5)) as running:
        assert running.ends() == ["returned", "returned"]
        running.agent.report(1, FaultKind.PROCESS_DEATH, "it has ended")
        assert not any(rank.calls for rank in running.ranks)
        assert not any(rank.processor.started for rank in running.ranks)
