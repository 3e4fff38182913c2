"""The rank's functions of the SDK, with the documented names, parameters and defaults.

Each works on the processor of this process (current.py). Errors are logged and raised.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mindio_tft_patch.adaptors.sdk import controller, current, training, transfers
from mindio_tft_patch.adaptors.sdk.callbacks import register_functions

log = logging.getLogger("mindio_tft_patch.sdk")

F = TypeVar("F", bound=Callable[..., Any])


def _logged(function: F) -> F:
    """Log what a function raises; the documents of the SDK promise both."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as problem:
            words = str(problem)  # most begin with the name
            log.error("%s", words if words.startswith(function.__name__) else f"{function.__name__}: {words}")
            raise

    return wrapper  # type: ignore[return-value]


# Life of the processor.


@_logged
def tft_init_processor(  # noqa: PLR0917 - the documented signature
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Prepare this rank.

    Args:
        rank: global rank, 0 to world_size - 1.
        world_size: ranks of the job, 1 to 100000.
        enable_local_copy: the framework copies the optimizer state before each update.
        enable_tls: refuse a control channel that is not encrypted.
        tls_info: certificates of the original; checked, not used (tls_info.py).
        enable_uce: repair memory and communication faults in place.
        enable_arf: go on with a new process in the place of a lost one.
        enable_zit: no effect: training with fewer ranks is not supported.

    Raises:
        ConfigError: a parameter that cannot be, or a second call.
    """
    current.processor().init(
        rank=rank,
        world_size=world_size,
        enable_local_copy=enable_local_copy,
        enable_tls=enable_tls,
        tls=tls_info,
        enable_uce=enable_uce,
        enable_arf=enable_arf,
        enable_zit=enable_zit,
    )


@_logged
def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Connect to the controller.

    Args:
        master_ip: address or name of the controller's node; no all-zero address.
        port: 1024 to 65535.
        local_ip: address of this node; checked, not used.

    Raises:
        ConfigError: a parameter that cannot be, or a call out of order.
        ControlError: the controller cannot be reached, or refuses.
    """
    current.processor().start(master_ip, port, local_ip)


@_logged
def tft_destroy_processor() -> None:
    """Training is over: leave the controller. Does nothing without a processor."""
    current.processor().finish()
    current.replace(None)


@_logged
def tft_is_reboot_node() -> bool:
    """Does this process take the place of a lost one, while the job goes on? To be asked once, after the start."""
    if not current.processor().started:
        raise training.not_started("tft_is_reboot_node")
    return current.processor().returning


def tft_get_reboot_type() -> str:
    """Why this process was started anew: always "arf"; a hot switch of nodes is not part of this product."""
    return "arf"


# State of the optimizer.


@_logged
def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Say which ranks hold the same optimizer state as this one (replicas.py).

    Args:
        rank: global rank, 0 to 99999.
        replica_info: for each optimizer a dictionary with rank_list, replica_cnt and replica_shift.

    Raises:
        ConfigError: it has not the documented form.
    """
    current.processor().set_replicas(rank, replica_info)


@_logged
def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Say which ranks are in the data-parallel group. Checked, not used: it serves training with fewer ranks.

    Raises:
        ConfigError: a parameter that cannot be.
    """
    current.processor().set_dp_group(rank, dp_rank_list)


@_logged
def tft_start_updating_os(backup_step: int = -1) -> None:
    """The optimizer update begins.

    Args:
        backup_step: step of the copy of the state before it; -1: there is none.

    Raises:
        ConfigError: backup_step is none.
        RuntimeError: training is stopped, or a checkpoint is being written.
    """
    training.start_updating(current.processor(), backup_step)


@_logged
def tft_start_copy_os() -> None:
    """The framework begins to copy the optimizer state.

    Raises:
        RuntimeError: training is stopped, or a checkpoint is being written.
    """
    current.processor().updates.copy()


@_logged
def tft_end_updating_os(step: int) -> None:
    """The optimizer update is complete.

    Args:
        step: 1 or more.

    Raises:
        ConfigError: step is none.
    """
    current.processor().updates.end(step)


def tft_reset_limit_step() -> None:
    """Have the next update raise FORCE STOP: for a stop callback whose training thread notices nothing else."""
    current.processor().updates.forbid("tft_reset_limit_step was called")


@_logged
def tft_report_load_ckpt_step(step: int) -> None:
    """The repair callback has loaded a checkpoint of this step.

    Raises:
        ConfigError: step is no step.
    """
    current.processor().report_loaded(step)


# Training.


def tft_exception_handler(func: F) -> F:
    """Put a training function under protection (training.py).

    Raises:
        TypeError: func cannot be called.
    """
    return training.decorated(current.processor, func, destroy=_destroy)


def _destroy() -> None:
    """The training function has returned."""
    hosts_controller = current.processor().hosts_controller
    tft_destroy_processor()
    if hosts_controller:
        controller.tft_destroy_controller()


@_logged
def tft_set_step_args(args: Any) -> None:
    """What the callbacks get as `args`; for frameworks whose training function gets other arguments.

    Raises:
        RuntimeError: a checkpoint is being written.
    """
    training.set_step_args(current.processor(), args)


def tft_pause_train(cur_step: int) -> None:
    """Hold here when the controller says so; to be called between two steps.

    Args:
        cur_step: last completed step, 0 or more.

    Raises:
        RuntimeError: training is stopped.
    """
    training.pause_train(current.processor(), cur_step)


@_logged
def tft_report_error(error_type: Any, error_code: str = "") -> None:
    """Report that the training thread has left the training function; for a decorator of one's own.

    Args:
        error_type: ReportState, or its value.
        error_code: code of the device; stands in the log.

    Raises:
        ConfigError: error_type is no ReportState.
        ControlError: the processor does not run.
    """
    training.report_error(current.processor(), error_type, error_code)


def tft_wait_next_action() -> int:
    """Wait until the recovery is over.

    Returns:
        0 when the training function is to be called again, 1 when the job ends (Action).
    """
    return training.wait_next_action(current.processor())


def tft_get_repair_step() -> int:
    """Step that the repair or rollback under way leads to; 0: there is none."""
    return current.processor().handlers.state.step


def tft_get_repair_type() -> str:
    """What is being done, for the callbacks: retry, recover, dump or unknow."""
    return transfers.repair_type_name(current.processor().handlers.state.plan)


# On-chip memory errors.


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Can a memory error be repaired from a replica, as far as its time tells (uce_time.py)?

    Args:
        hbm_error_time: when it came, in microseconds of the device's clock.
        start_time: begin of the last update; default: as set last.
        end_time: end of it; default: as set last.
    """
    return current.processor().times.repairable(hbm_error_time, start_time, end_time)


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """The update begins now, in microseconds of the device's clock; default: ask the device."""
    current.processor().times.set_start(start_time)


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """The update has ended now, in microseconds of the device's clock; default: ask the device."""
    current.processor().times.set_end(end_time)


# Frameworks.


@_logged
def set_mindio_export_version(framework_type: str) -> None:
    """Name the framework: "MindSpeed" or "MindSpeed-LLM".

    Raises:
        ConfigError: it is neither.
    """
    training.export_version(current.processor(), framework_type)


def get_mindio_export_version() -> str | None:
    """The framework, as named; None: none was."""
    return current.processor().framework or None


def get_device() -> int | None:
    """Number of this process's device; None: it has none."""
    return current.processor().accelerator.index


# Callbacks: the fifteen functions tft_register_..._handler, made from one table.


def _register(kind: str, arguments: Mapping[str, Any]) -> None:
    current.processor().register(kind, arguments)


REGISTER_FUNCTIONS = {name: _logged(function) for name, function in register_functions(_register).items()}
globals().update(REGISTER_FUNCTIONS)
