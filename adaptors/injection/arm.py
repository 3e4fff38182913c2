"""Arms one rank: moments, kinds and the injector, put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mindio_tft_patch.adaptors.injection import memory, moments, sockets
from mindio_tft_patch.config import Config
from mindio_tft_patch.fault_injection import (
    STATE_VARIABLE,
    VARIABLE,
    Act,
    FaultInjector,
    PlannedFault,
    kinds,
    read_schedule,
)
from mindio_tft_patch.fired_faults import FiredFaults
from mindio_tft_patch.processor.progress import ProgressBoard

log = logging.getLogger("mindio_tft_patch.injection")


class Rank(Protocol):
    """What is needed of a rank; adaptors.megatron.session.Session, or porting.faults.Ported."""

    @property
    def config(self) -> Config:
        """Flags and variables."""
        ...

    @property
    def board(self) -> ProgressBoard:
        """Where moments come from."""
        ...

    @property
    def gate(self) -> Any:
        """The commit gate (porting.gate.StepGate)."""
        ...

    @property
    def training(self) -> Any:
        """Objects of the running train(), with `model` and `optimizer`; None before it."""
        ...

    @property
    def replaces(self) -> bool:
        """This process has taken the place of a lost one; for as long as it lives."""
        ...


def arm(session: Rank, environ: Mapping[str, str], version: str) -> None:
    """Let the schedule of TFT_INJECT happen to this rank of Megatron; without one nothing is done.

    version: of Megatron core.

    Raises:
        ConfigError: the schedule makes no sense.
        PatchError: a function of Megatron that marks a moment is not there.
    """
    injector = _injector(session, environ)
    if injector is not None:
        moments.add(session.board, session.gate, version)
        session.board.listen(injector)


def arm_framework(rank: Rank, environ: Mapping[str, str]) -> None:
    """The same for a rank of any other framework, when its model exists.

    Raises:
        ConfigError: the schedule makes no sense.
    """
    injector = _injector(rank, environ)
    if injector is not None:
        moments.add_to_framework(rank.board, rank.gate, rank.training.model)
        rank.board.listen(injector)


def _injector(rank: Rank, environ: Mapping[str, str]) -> FaultInjector | None:
    schedule = read_schedule(environ.get(VARIABLE, ""))
    if not schedule:
        return None
    config = rank.config
    folder = environ.get(STATE_VARIABLE)
    injector = FaultInjector(
        schedule,
        config.rank,
        {**kinds(), **_adaptor_kinds(rank)},
        replaces=lambda: rank.replaces,
        fired=FiredFaults(Path(folder)) if folder else None,
    )
    if config.local_rank == 0:
        log.warning(
            "%s is set: %d fault(s) will be injected into this job on purpose: %s",
            VARIABLE,
            len(schedule),
            environ[VARIABLE],
        )
    return injector


def _adaptor_kinds(session: Rank) -> dict[str, Act]:
    config = session.config

    def break_sockets(fault: PlannedFault) -> None:
        sockets.break_connections({config.master_port, config.port})

    memory_kinds = memory.kinds(lambda: session.training, session.board, config.rank)
    return {**memory_kinds, "broken_sockets": break_sockets}
