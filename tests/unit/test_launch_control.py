"""When a launcher takes the controller for lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mindio_tft_patch.launch.control import Control


class Launcher:
    """One with a controller of its own (node 0) or of another node, which does not answer."""

    def __init__(self, server: Any = None) -> None:
        self.now = 100.0
        self.client = SimpleNamespace(connected=True)
        store: Any = None
        client: Any = self.client
        self.control = Control(store, client, server, 5.0, clock=lambda: self.now)

    def looks(self, seconds: float, step: float = 0.5) -> str:
        """Look at the controller for some time; what was found last."""
        until, lost = self.now + seconds, ""
        while self.now < until:
            self.now += step
            lost = self.control.lost()
        return lost


def test_a_controller_that_is_silent_for_too_long_is_lost_until_it_is_heard_again() -> None:
    launcher = Launcher()
    launcher.looks(3)
    launcher.client.connected = False
    assert launcher.looks(4) == ""
    assert "silent for 6 s" in launcher.looks(2)
    launcher.client.connected = True
    assert launcher.looks(0.5) == ""


def test_a_launcher_that_stood_still_itself_has_not_listened() -> None:
    launcher = Launcher()
    launcher.looks(3)
    launcher.client.connected = False
    assert launcher.looks(600, step=600) == ""
    assert launcher.looks(2) == ""
    assert launcher.looks(3) != ""


def test_a_controller_in_the_same_process_is_lost_only_with_its_thread() -> None:
    server = SimpleNamespace(alive=True)
    launcher = Launcher(server)
    launcher.client.connected = False
    assert launcher.looks(60) == ""
    server.alive = False
    assert launcher.looks(60) != ""
