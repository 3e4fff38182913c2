"""A rank that ends with exit code 0: only the controller knows whether its training was over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindio_tft_patch.launch import agent
from mindio_tft_patch.launch.agent import FaultTolerantAgent
from mindio_tft_patch.launch.in_place import InPlace
from mindio_tft_patch.processor.guard import EXIT_CODE
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import Phase, Strategy


class Node:
    """A launcher's looks at three ranks, with a clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.codes: dict[int, int] = {}
        self.reports: list[tuple[int, str, int]] = []
        self.restarted: list[int] = []
        monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.agent: Any = FaultTolerantAgent.__new__(FaultTolerantAgent)
        self.agent._deaths, self.agent._quiet, self.agent._unstarted = [], [], set()
        self.agent._reserve = None
        self.agent._in_place = InPlace((0, 1, 2), 0, agent.Counter())
        self.agent._respawner = SimpleNamespace(restart=self.restarted.append)
        self.processes: Any = SimpleNamespace(pids={0: 10, 1: 11, 2: 12}, look=self._look)
        self.control: Any = SimpleNamespace(
            aware=lambda: True, report_death=lambda *report: self.reports.append(report), attempt=0
        )

    def _look(self) -> dict[int, int]:
        codes, self.codes = self.codes, {}
        return codes

    def looks(self, *commands: Do) -> list[int]:
        """Ranks that this look takes for dead."""
        return [death.rank for death in self.agent._look(self.processes, self.control, commands)]


def test_it_is_told_after_its_own_word_has_had_time_and_is_no_death_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.codes = {1: 0, 2: EXIT_CODE}
    assert node.looks() == [] and node.reports == []
    node.now += 2.5
    assert node.looks() == []
    assert node.reports == [(1, "ended with exit code 0", 11)]
    node.now += 60
    assert node.looks() == [] and len(node.reports) == 1
    assert node.agent._deaths == []


def test_another_code_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.codes = {0: 3, 1: 0}
    assert node.looks() == [0]
    assert node.reports == [(0, "ended with exit code 3", 10)]


def test_who_was_replaced_meanwhile_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.codes = {1: 0}
    node.looks()
    node.looks(Do(1, Phase.STOP, Plan(Strategy.RESPAWN, "because", faulty=(1,), lost=(1,))))
    assert node.restarted == [1]
    node.now += 60
    node.looks()
    assert node.reports == []
