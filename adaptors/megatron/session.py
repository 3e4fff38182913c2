"""One rank of Megatron under protection: the parts of the adaptor, put together (adaptation point 1).

Control plane, device and guard are those of every framework (adaptors/porting/protection.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.handlers import MegatronHandlers
from mindio_tft_patch.adaptors.megatron.in_place import InPlace
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.config import Config
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.guard import Guard
from mindio_tft_patch.protocol.phases import FaultKind


class Session:
    """Protection of one training process. Created by install; started when Megatron initialises communication.

    Attributes:
        handlers_type, in_place_type: what differs in another Megatron.
    """

    handlers_type: ClassVar[type[MegatronHandlers]] = MegatronHandlers
    in_place_type: ClassVar[type[InPlace]] = InPlace

    def __init__(self, config: Config) -> None:
        self.config = config
        self.protection = Protection(config)
        self.board = self.protection.board
        self.detector = self.protection.detector
        self.log_state = LogState()
        self.gate = CommitGate(
            self.board,
            barrier=self.protection.barrier,
            next_step=self._next_step,
            record=self._commit,
            exchange=self._exchange,
        )
        # None in a job that only saves: nothing of it costs anything there.
        wanted = config.in_place or config.scrub_interval > 0
        self.in_place = (
            self.in_place_type(config, self.board, self.gate, self.log_state, self.protection.unconnected)
            if wanted
            else None
        )
        self._handlers: MegatronHandlers | None = None
        self._args: Any = None

    @property
    def guard(self) -> Guard | None:
        """The loop around train(); None before start()."""
        return self.protection.guard

    @property
    def returning(self) -> bool:
        """This process takes the place of one that was lost while the job goes on."""
        return self.in_place is not None and self.in_place.returning

    @property
    def replaces(self) -> bool:
        """This process has taken the place of one that was lost; for as long as it lives."""
        return self.protection.replaces

    @property
    def training(self) -> Training | None:
        """The objects of the running train(); None before it."""
        return None if self._handlers is None else self._handlers.training

    @property
    def _client(self) -> Client | None:
        return self.protection.client

    @property
    def _device(self) -> Device:
        return self.protection.device

    def start(self, args: Any) -> None:
        """Connect to the controller (and run it, on rank 0 of a plain torchrun job) before communication begins.

        Raises:
            ControlError: the port is in use, or the controller cannot be reached.
        """
        protection = self.protection
        self._args = args
        protection.open()
        self._handlers = self.handlers_type(
            board=self.board,
            device=protection.device,
            gate=self.gate,
            log_state=self.log_state,
            in_place=self.in_place,
            rank=self.config.rank,
            attempt=lambda: protection.attempt,
            dump_seconds=self.config.dump_timeout_seconds,
        )
        protection.start(self._handlers)
        if self.in_place is not None:
            self.in_place.start(protection.store, returning=protection.returning)
            self.in_place.report_corruption = self._report_corruption

    def _report_corruption(self, detail: str, agreed: int) -> None:
        self.protection.report(FaultKind.CORRUPTION, detail, step=agreed)

    def ready(self, training: Training, train_data: Any, valid_data: Any) -> None:
        """train() is about to begin with these objects and data iterators: from here on this rank can be recovered."""
        assert self._handlers is not None
        self._args = training.args
        self._handlers.training, self._handlers.inside = training, True
        if self.in_place is not None:
            in_place, protection = self.in_place, self.protection
            in_place.ready(training, self._handlers.replica_sets(), train_data, valid_data)
            protection.no_checkpoint, in_place.tell_checkpoint = in_place.no_checkpoint, self._tell_checkpoint
        self.protection.ready(training.args.iteration)

    def _tell_checkpoint(self) -> None:
        assert self.in_place is not None
        self.protection.no_checkpoint = self.in_place.no_checkpoint
        self.protection.offer()

    def left_train(self) -> None:
        """train() has returned: it cannot be entered again, but its result can be saved."""
        assert self._handlers is not None
        self._handlers.inside = False
        if self.in_place is not None:
            # What comes after train() is not part of its last step, even when the end of that was repeated.
            self.in_place.ending.forget()
            self.protection.offer()

    def finish(self) -> None:
        """Training ended in good order: whatever happens to this process from now on is no fault."""
        self.protection.finish()

    def boundary(self) -> None:
        """Between two steps: the controller may want this rank to hold."""
        self.protection.boundary(self.board.commit.step)

    def _next_step(self) -> int:
        return int(self._args.curr_iteration) + 1

    def _exchange(self) -> Callable[[], None]:
        if self.in_place is None or self.training is None:
            return lambda: None
        end_exchange = self.in_place.begin_exchange(self.training)

        def wait_for_it() -> None:
            with self._device.host_waits():
                end_exchange()

        return wait_for_it

    def _commit(self, step: int, skipped: bool) -> None:
        training = self.training
        if training is not None:
            training.state.commit(step, skipped)
        if self.in_place is not None:
            self.in_place.committed(step)
