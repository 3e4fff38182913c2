"""How often a job may be recovered in place, so that a fault that comes back does not keep it in an endless loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from mindio_tft_patch.controller.roster import named
from mindio_tft_patch.controller.targets import IN_PLACE
from mindio_tft_patch.protocol.phases import Strategy

IN_A_ROW = 2  # a fault that comes back at the same place is no accident


@dataclass(frozen=True)
class Recovered:
    """A recovery in place that has succeeded.

    step: target step; of a reload the step that the ranks had come to, since that is where the fault comes back.
    faulty: ranks whose state was filled.
    """

    strategy: Strategy
    step: int
    faulty: tuple[int, ...]


@dataclass
class Budget:
    """Recoveries in place over the life of a job.

    Attributes:
        limit: how many there may be.
    """

    limit: int
    used: int = 0
    _recent: list[Recovered] = field(default_factory=list)  # those in a row at one step with the same faulty ranks

    @property
    def left(self) -> int:
        """How many there may still be."""
        return max(0, self.limit - self.used)

    def exhausted(self) -> dict[Strategy, str]:
        """The strategies that must not be used any more, with the reason."""
        if self.left:
            return {}
        return dict.fromkeys(IN_PLACE, f"the job has used up its {self.limit} recoveries in place")

    def repeated(self, planned: Recovered) -> str:
        """Why a recovery would only be one more of the same; empty when it would not."""
        alike = takewhile(lambda one: _place(one) == _place(planned), reversed(self._recent))
        times = sum(1 for one in alike if one.strategy is planned.strategy)
        if times < IN_A_ROW:
            return ""
        who = named(planned.faulty) if planned.faulty else "the job"
        return f"it has not helped {who} at step {planned.step}: the fault came back {times} times in a row"

    def add(self, recovered: Recovered) -> None:
        """A recovery in place has succeeded."""
        self.used += 1
        if self._recent and _place(self._recent[-1]) != _place(recovered):
            self._recent.clear()
        self._recent.append(recovered)


def _place(recovered: Recovered) -> tuple[int, tuple[int, ...]]:
    return recovered.step, recovered.faulty
