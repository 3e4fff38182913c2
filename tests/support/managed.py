"""A job of support.control with a cluster manager: what it orders, and what it is told."""

from __future__ import annotations

from mindio_tft_patch.controller.events import (
    Answer,
    Attached,
    Choose,
    FaultyRanks,
    Order,
    PauseTraining,
    Report,
    ReportFaults,
    ReportResult,
    ReportStopped,
    ReportStrategies,
    SaveAndExit,
    StopTraining,
    Tell,
    Unheard,
)
from support.control import EVERYTHING, Job


class ManagedJob(Job):
    """Nobody but the cluster manager starts processes anew, unless told otherwise."""

    def __init__(self, *, attached: bool = True, **options: object) -> None:
        super().__init__(**{"with_agent": False, "strategies": EVERYTHING, **options})  # type: ignore[arg-type]
        if attached:
            assert self.order(Attached()).obeyed
        self.outbox.clear()

    def order(self, order: Order) -> Answer:
        answers = [one for one in self.feed(order) if isinstance(one, Answer)]
        assert len(answers) == 1
        return answers[0]

    def stop(self, ranks: dict[int, int]) -> Answer:
        return self.order(StopTraining(ranks))

    def names(self, ranks: dict[int, int], seconds: float = 1.0) -> Answer:
        return self.order(FaultyRanks(ranks, seconds))

    def chooses(self, word: str) -> Answer:
        return self.order(Choose(word))

    def pauses(self, seconds: float | None = None) -> Answer:
        return self.order(PauseTraining(seconds))

    def saves_and_exits(self) -> Answer:
        return self.order(SaveAndExit())

    def unheard(self) -> Answer:
        return self.order(Unheard("the callback raised"))

    @property
    def told(self) -> list[Report]:
        """Everything that the manager was told, in order."""
        return [one.report for one in self.outbox if isinstance(one, Tell)]

    @property
    def told_faults(self) -> list[dict[int, int]]:
        return [dict(one.ranks) for one in self.told if isinstance(one, ReportFaults)]

    @property
    def told_stopped(self) -> list[ReportStopped]:
        return [one for one in self.told if isinstance(one, ReportStopped)]

    @property
    def told_strategies(self) -> list[tuple[str, ...]]:
        return [one.words for one in self.told if isinstance(one, ReportStrategies)]

    @property
    def told_results(self) -> list[tuple[int, str]]:
        return [(int(one.code), one.word) for one in self.told if isinstance(one, ReportResult)]
