"""What has been settled with the cluster manager about one recovery. No I/O; controller.walker carries it out.

    a fault was reported --the manager orders stop, all ranks have stopped--> it is told so
        --it names all faulty ranks--> it is told which strategies fit
        --it chooses one--> carried out, and it is told the result
        --the strategy has failed--> it is told what is left: it names ranks again, or chooses at once

When its word does not come in time, the deal is off: the controller decides by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mindio_tft_patch.controller.vocabulary import EXIT, STRATEGIES
from mindio_tft_patch.protocol.phases import Strategy


class Stage(str, Enum):
    """Whose turn it is."""

    STOP = "to order training to stop"
    RANKS = "to name all faulty ranks"
    CHOICE = "to choose a strategy"
    CHOSEN = "nothing: its choice is being carried out"


@dataclass
class Deal:
    """One negotiation.

    Attributes:
        stage: what is waited for.
        deadline: until when; None: not limited, because it is not the manager's turn.
        ordered: the manager has ordered the stop.
        told: faulty ranks as the manager knows them.
        offered: words that the manager may choose among.
        choice: what it has chosen.
        failed: why that did not work; the manager has not been told yet.
    """

    stage: Stage = Stage.STOP
    deadline: float | None = None
    ordered: bool = False
    told: dict[int, int] = field(default_factory=dict)
    offered: tuple[str, ...] = ()
    choice: str = ""
    failed: str = ""

    @property
    def among(self) -> tuple[Strategy, ...]:
        """What the choice allows."""
        return STRATEGIES[self.choice]

    @property
    def chosen(self) -> bool:
        """A choice is being carried out."""
        return self.stage is Stage.CHOSEN

    def wait(self, stage: Stage, now: float, seconds: float) -> None:
        """It is the manager's turn."""
        self.stage, self.deadline = stage, now + seconds

    def choose(self, word: str) -> None:
        """The manager has chosen."""
        self.choice, self.stage, self.deadline, self.offered = word, Stage.CHOSEN, None, ()

    def fails(self, reason: str) -> None:
        """The choice did not work; when all have stopped the manager is told."""
        self.failed, self.stage, self.deadline = reason, Stage.RANKS, None

    def may_choose(self, word: str) -> str:
        """Why a choice is not possible now; empty when it is."""
        if self.chosen:
            # While one strategy is carried out, the manager may lose patience.
            ending = word in ("dump", EXIT) and self.choice not in ("dump", EXIT)
            return "" if ending else f"{self.choice} is being carried out"
        if not self.offered:
            return f"the cluster manager is {self.stage.value}"
        return "" if word in self.offered else f"only {', '.join(self.offered)} are possible"
