"""The end of an iteration, repeated after a fault that has cut it off.

After the update of a step Megatron averages its losses, writes the log line, evaluates and saves. A fault in there
leaves ranks at different places of it, though the step itself is complete on all of them. `train()` is then entered one
iteration early, and its first train_step does not compute: forward_backward_func answers with the losses of the step,
optimizer.step() with what it had returned. Everything behind it is Megatron's own code again, on all ranks. What the
rank that prints had printed already is done without printing; a completed evaluation or save is left out.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.step_exchange import micro_batches_of

log = logging.getLogger("mindio_tft_patch.resume")


@dataclass(frozen=True)
class EndOfStep:
    """What is repeated.

    losses: of this rank (step_exchange.losses_of); None where there is no loss.
    result: what optimizer.step() returned.
    logged, evaluated, saved: already done.
    """

    step: int
    losses: dict[str, tuple[str, list[float]]] | None = None
    result: tuple[Any, ...] = ()
    logged: bool = False
    evaluated: bool = False
    saved: bool = False


class IterationEnd:
    """Knows whether the current iteration is a real one or a repeated end.

    Attributes:
        losses: of the last real forward and backward pass; None before it, and where there is no loss.
    """

    def __init__(self, gate: CommitGate) -> None:
        self._gate = gate
        self._repeated: EndOfStep | None = None
        self._in_step = False
        self.losses: Any = None

    @property
    def repeated(self) -> EndOfStep | None:
        """The end that is being repeated; None in a real iteration."""
        return self._repeated

    def repeat(self, end: EndOfStep) -> None:
        """The next iteration is the repeated end of a completed step."""
        self._repeated = end

    def forget(self) -> None:
        """The next iteration is a real one."""
        self._repeated = None
        self._gate.answer = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around train_step: does not compute while an end is repeated; ends the repetition at the step after it."""
        end = self._repeated
        if end is not None and self._in_step:
            self.forget()
            self._in_step = False
            end = None
        if end is None:
            self.losses = None
            yield
            return
        self._in_step = True
        log.info("repeating the end of step %d", end.step)
        self._gate.answer = end.result
        try:
            yield
        finally:
            self._gate.answer = None

    def around_get_forward_backward(
        self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Wrapper of get_forward_backward_func: its function notes the losses, or answers with known ones."""
        compute = wrapped(*args, **kwargs)

        def forward_backward(*inner: Any, **named: Any) -> Any:
            if named.get("forward_only", True):
                return compute(*inner, **named)
            if self._gate.answer is not None and self._repeated is not None:
                return micro_batches_of(self._repeated.losses)
            self.losses = compute(*inner, **named)
            return self.losses

        return forward_backward

    @contextmanager
    def log_line(self) -> Iterator[None]:
        """Around training_log: silent when the line was written before the fault."""
        if self._repeated is None or not self._repeated.logged:
            yield
            return
        with contextlib.redirect_stdout(io.StringIO()), _without_writers():
            yield

    @property
    def leaves_out_evaluation(self) -> bool:
        """The evaluation that is due was completed before the fault."""
        return self._repeated is not None and self._repeated.evaluated

    @property
    def leaves_out_save(self) -> bool:
        """The save that is due was completed before the fault."""
        return self._repeated is not None and self._repeated.saved


@contextmanager
def _without_writers() -> Iterator[None]:
    """Tensorboard and its like have the points of this step already."""
    from megatron.training import global_vars

    names = [name for name in ("_GLOBAL_TENSORBOARD_WRITER", "_GLOBAL_WANDB_WRITER") if hasattr(global_vars, name)]
    before = {name: getattr(global_vars, name) for name in names}
    for name in names:
        setattr(global_vars, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(global_vars, name, value)
