"""The decorator around a training function, and the calls from which another framework can build its own.

    enter func -> it raises -> report -> the control thread: stop, clean, rebuild, repair, rollback -> enter func again

What is raised in the end: SystemExit with the exit code of ended jobs after a RuntimeError, everything else as it was
raised. Before that the ranks have written their checkpoint, this one included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mindio_tft_patch.adaptors.sdk import checks
from mindio_tft_patch.adaptors.sdk.enums import Action, ReportState
from mindio_tft_patch.adaptors.sdk.mainline import Report, Verdict
from mindio_tft_patch.adaptors.sdk.patterns import KINDS
from mindio_tft_patch.adaptors.sdk.processor import Processor
from mindio_tft_patch.adaptors.sdk.updates import ForceStopError
from mindio_tft_patch.errors import ConfigError, ControlError, Interrupted
from mindio_tft_patch.processor.guard import EXIT_CODE, forget_frames
from mindio_tft_patch.protocol.phases import FaultKind

log = logging.getLogger("mindio_tft_patch.sdk")

F = TypeVar("F", bound=Callable[..., Any])

FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")  # whose training functions get lists that the callbacks change


def decorated(processor: Callable[[], Processor], func: F, *, destroy: Callable[[], None]) -> F:
    """`func` under protection.

    Args:
        destroy: called when `func` has returned.

    Raises:
        TypeError: func cannot be called.
    """
    checks.function("tft_exception_handler", "func", func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # A list: what the callbacks put into it is used when the function is called again.
        arguments = list(args)
        one = processor()
        one.set_step_args(arguments)
        while True:
            if not one.returning:
                one.begin()
            try:
                result = func(*arguments, **kwargs)
            except (SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                if not one.started:
                    raise
                leave_or_stay(one, error)
            else:
                destroy()
                return result

    return wrapper  # type: ignore[return-value]


def leave_or_stay(processor: Processor, error: BaseException) -> None:
    """The training function has raised: returns when it is to be called again.

    Raises:
        SystemExit: the job ends.
        BaseException: `error`, when the job ends and it is no RuntimeError, or when the controller is gone.
    """
    report = _report_of(processor, error)
    log.warning("training was left: %s (%s)", report.detail, report.state.name)
    # The frames of the exception hold a step's activations, which the repair may need the room of.
    forget_frames(error)
    verdict = processor.arrive(report)
    if verdict is Verdict.AGAIN:
        return
    if verdict is Verdict.LEAVE and isinstance(error, RuntimeError):
        raise SystemExit(EXIT_CODE) from error
    raise error


def _report_of(processor: Processor, error: BaseException) -> Report:
    report = processor.patterns.report_of(error)
    if report.kind is None and not processor.returning:
        # Nothing is left to be done for it: the controller has not asked for what this is the end of.
        return Report(report.state, FaultKind.EXCEPTION, report.detail, error)
    return report


def report_error(processor: Processor, error_type: Any, error_code: str) -> None:
    """tft_report_error.

    Raises:
        ConfigError: error_type is no ReportState.
        ControlError: the processor does not run.
    """
    state = _state(error_type)
    if not processor.started:
        raise not_started("tft_report_error")
    detail = state.name + (f"; device error type {error_code}" if error_code else "")
    kind = KINDS[state]
    if kind is None and not processor.returning:
        kind = FaultKind.EXCEPTION
    processor.arrive_without_waiting(Report(state, kind, detail))
    if state is ReportState.RS_UNKNOWN:
        # A process that ended now would take its part of the state with it, before the checkpoint is written.
        processor.mainline.wait_for_verdict(processor.config.phase_timeout_seconds)


def wait_next_action(processor: Processor) -> int:
    """tft_wait_next_action: 0 (Action.RETRY) or 1 (Action.EXIT)."""
    if not processor.attending:
        log.error("tft_wait_next_action: the processor does not run")
        return Action.EXIT.value
    verdict = processor.mainline.wait_for_verdict()
    return Action.RETRY.value if verdict is Verdict.AGAIN else Action.EXIT.value


def pause_train(processor: Processor, cur_step: Any) -> None:
    """tft_pause_train.

    Raises:
        ConfigError: cur_step is no step.
        ForceStopError: training is stopped, perhaps while it held here.
    """
    step = checks.integer("tft_pause_train", "cur_step", cur_step, 0, checks.STEP_END - 1)
    processor.updates.leave_if_stopped()
    try:
        processor.hold(step)
    except Interrupted as stopped:
        raise ForceStopError("FORCE STOP: training was stopped while it held between two steps") from stopped


def start_updating(processor: Processor, backup_step: Any) -> None:
    """tft_start_updating_os.

    Raises:
        ConfigError: backup_step is none.
        RuntimeError: training is stopped, or a checkpoint is being written.
    """
    if processor.returning and processor.started:
        raise RuntimeError("ARF FINISH: this process takes the place of a lost one and has no state yet")
    if not processor.started:
        _warn_once("tft_start_updating_os: the processor does not run, so nothing protects this training")
    processor.begin()
    processor.updates.start(backup_step)


@functools.cache
def _warn_once(words: str) -> None:
    log.warning("%s", words)


def export_version(processor: Processor, framework_type: Any) -> None:
    """set_mindio_export_version.

    Raises:
        ConfigError: the framework is not known.
    """
    if framework_type not in FRAMEWORKS:
        raise ConfigError(
            f"set_mindio_export_version: the framework {framework_type!r} is not known.",
            change=f"Pass one of {', '.join(FRAMEWORKS)}, or do not call it.",
        )
    processor.framework = framework_type
    processor.options.stops_before_dump = True


def set_step_args(processor: Processor, args: Any) -> None:
    """tft_set_step_args.

    Raises:
        ForceStopError: a checkpoint is being written.
    """
    if args is None:
        log.warning("tft_set_step_args(None) is ignored")
    elif processor.framework in FRAMEWORKS:
        log.warning("tft_set_step_args is not needed for %s, and ignored", processor.framework)
    else:
        processor.updates.leave_if_stopped()
        processor.set_step_args(args)


def not_started(call: str) -> ControlError:
    """A call that needs the controller was made before it was reached."""
    return ControlError(f"{call}: the processor does not run. Call tft_init_processor and tft_start_processor first.")


def _state(value: Any) -> ReportState:
    try:
        return value if isinstance(value, ReportState) else ReportState(value)
    except ValueError:
        names = ", ".join(ReportState.__members__)
        raise ConfigError(f"tft_report_error: error_type is {value!r}.", change=f"Pass one of {names}.") from None
