"""The tiny trainer in a job that is held for a while: for a test of point 12, under plain torchrun.

The controller lives in rank 0 then, where a thread plays the cluster manager.
"""

from __future__ import annotations

# isort: off
import mindio_tft_patch  # noqa: F401  (first: lets the CPU stand in where TFT_DEVICE=cpu asks for it)

# isort: on
import threading
import time

from final_state import write_final_state
from options import read_options
from tolerance import Tolerance
from train import Trainer

from mindio_tft_patch.controller.events import Choose, PauseTraining, Report, ReportStopped
from mindio_tft_patch.controller.server import ControllerServer


class Manager:
    """Has the job hold after a few steps, and go on."""

    def __init__(self, server: ControllerServer, tolerance: Tolerance) -> None:
        self._server = server
        self._tolerance = tolerance
        self._holding = threading.Event()

    def tell(self, report: Report) -> None:
        """Take a report of the controller."""
        if isinstance(report, ReportStopped) and report.code == 0:
            self._holding.set()

    def run(self) -> None:
        """The thread."""
        while self._tolerance.board.commit.step < 3:
            time.sleep(0.01)
        self._server.attach(self)
        answer = self._server.order(PauseTraining(60.0))
        held = self._holding.wait(30.0)
        step = self._tolerance.board.commit.step
        time.sleep(0.5)
        stayed = self._tolerance.board.commit.step == step
        print(f"obeyed {answer.obeyed}, held {held}, stayed {stayed}", flush=True)
        print(f"continued {self._server.order(Choose('continue')).obeyed}", flush=True)


def main() -> None:
    """Train."""
    options = read_options()
    tolerance = Tolerance(options)
    tolerance.begin()
    trainer = Trainer(options, tolerance)
    tolerance.ready(trainer)
    server = tolerance.protection.server
    if server is not None:
        threading.Thread(target=Manager(server, tolerance).run, daemon=True).start()
    tolerance.protection.run(trainer.train)
    tolerance.protection.finish()
    write_final_state(trainer)


if __name__ == "__main__":
    main()
