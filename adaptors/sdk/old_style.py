"""The names of the first generation of the SDK (`ttp_*`): the dying gasp, nothing else.

    @ttp_to_persist
    def train(...):
        ttp_init_controller(rank, world_size, replica_offset, False); ttp_start_controller(ip, port)     # rank 0
        ttp_init_processor(rank, dp_ranks, len(dp_ranks), world_size, replica_offset, False)
        ttp_start_processor(ip, port)
        ttp_register_save_ckpt_handler(save); ttp_register_rename_handler(rename)
        each step: ttp_start_updating_os(-1) ... ttp_end_updating_os(step); ttp_set_ckpt_args((iteration, model, ...))

The data-parallel group is cut into parts of `replica_offset` ranks, each of which holds everything. The callbacks are
called like those of today: save(step, save_info, args, ctx) and rename(step, args).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mindio_tft_patch.adaptors.sdk import api, checks, controller
from mindio_tft_patch.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def ttp_init_controller(rank: int, world_size: int, replica_offset: int, enable_local_copy: bool) -> None:
    """tft_init_controller, with the size of a part of the data-parallel group, which the processors report too."""
    checks.integer("ttp_init_controller", "replica_offset", replica_offset, 1, checks.WORLD_SIZE_MAX)
    controller.tft_init_controller(rank, world_size, enable_local_copy)


def ttp_start_controller(bind_ip: str, port: int) -> None:
    """tft_start_controller."""
    controller.tft_start_controller(bind_ip, port, False, "")


def ttp_init_processor(  # noqa: PLR0917 - the signature of the original
    rank: int, dp_ranks: Sequence[int], dp_size: int, world_size: int, replica_offset: int, enable_local_copy: bool
) -> None:
    """tft_init_processor and tft_set_optimizer_replica in one.

    Raises:
        ConfigError: the data-parallel group cannot be cut into such parts.
    """
    call = "ttp_init_processor"
    # That Megatron keeps the ranks of a group as a range.
    if not isinstance(dp_ranks, (list, tuple, range)) or dp_size != len(dp_ranks):
        raise ConfigError(
            f"{call}: dp_size is {dp_size!r}, but dp_ranks is {dp_ranks!r}.", change="Pass len(dp_ranks)."
        )
    checks.integer(call, "replica_offset", replica_offset, 1, max(1, dp_size))
    copies, rest = divmod(dp_size, replica_offset)
    if rest:
        raise ConfigError(
            f"{call}: {dp_size} data-parallel ranks cannot be cut into parts of {replica_offset}.",
            change="Choose an even data-parallel size, and pass half of it.",
        )
    api.tft_init_processor(rank, world_size, enable_local_copy, False, "", False, False)
    info = {"rank_list": list(dp_ranks), "replica_cnt": copies, "replica_shift": replica_offset}
    api.tft_set_optimizer_replica(rank, [info])


def ttp_start_processor(master_ip: str, port: int) -> None:
    """tft_start_processor."""
    api.tft_start_processor(master_ip, port)


def ttp_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """tft_register_save_ckpt_handler."""
    api.REGISTER_FUNCTIONS["tft_register_save_ckpt_handler"](func, ctx)


def ttp_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """tft_register_rename_handler."""
    api.REGISTER_FUNCTIONS["tft_register_rename_handler"](func, ctx)


def ttp_set_ckpt_args(args: Any) -> None:
    """tft_set_step_args: what the callbacks get as `args`."""
    api.tft_set_step_args(args)


def ttp_start_updating_os(backup_step: int) -> None:
    """tft_start_updating_os."""
    api.tft_start_updating_os(backup_step)


def ttp_end_updating_os(step: int) -> None:
    """tft_end_updating_os."""
    api.tft_end_updating_os(step)


def ttp_to_persist(func: F) -> F:
    """tft_exception_handler."""
    return api.tft_exception_handler(func)
