"""The optimizer of 2023 under the commit gate, and what has to be left out when the end of a step is repeated.

That Megatron has no method that begins where everything left is local. But inside `optimizer.step` the `step` of the
inner optimizer is the first thing that changes any state, and everything before it (copying, unscaling, clipping) can
be done again: so it is what waits at the gate. What follows it, the copy into the buffer that is gathered, is repeated
by every recovery.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron_legacy.replica_groups import replica_sets
from mindio_tft_patch.adaptors.porting.replica_layout import warn_of_shared_nodes
from mindio_tft_patch.config import Config

log = logging.getLogger("mindio_tft_patch.replica")


def replica_groups() -> Any:
    """Process groups of this process's replicated optimizer; None where the optimizer has no copies."""
    from mindio_tft_patch.adaptors.megatron_legacy.replica_optimizer import ReplicatedOptimizer

    return getattr(ReplicatedOptimizer, "groups", None)


class Update:
    """Wrappers around the optimizer of one rank."""

    def __init__(self, gate: CommitGate, config: Config) -> None:
        self._gate = gate
        self._config = config

    def around_build(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of get_megatron_optimizer(model, ...)."""
        from megatron import get_args

        with self._replicated():
            optimizer = wrapped(*args, **kwargs)
        model = args[0] if args else kwargs["model"]
        self._gate_inner(optimizer.optimizer)
        if get_args().use_distributed_optimizer:
            _let_gather(model, optimizer)
            self._tell()
        return optimizer

    def around_gather(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of gather_model_params: while the end of a step is repeated, its buffer does not hold parameters."""
        return None if self._gate.answer is not None else wrapped(*args, **kwargs)

    @contextmanager
    def _replicated(self) -> Iterator[None]:
        from megatron import optimizer as module

        from mindio_tft_patch.adaptors.megatron_legacy.replica_optimizer import ReplicatedOptimizer

        if self._config.copies == 1:
            yield
            return
        before = module.DistributedOptimizer
        ReplicatedOptimizer.copies = self._config.copies
        module.DistributedOptimizer = ReplicatedOptimizer
        try:
            yield
        finally:
            module.DistributedOptimizer = before

    def _tell(self) -> None:
        groups = replica_groups()
        if groups is None or self._config.rank != 0:
            return
        size = groups.copies * groups.size
        log.info("optimizer state in %d copies: a rank holds 1/%d of it, not 1/%d", groups.copies, groups.size, size)
        warn_of_shared_nodes(replica_sets(groups.copies, sharded=True), self._config.local_world_size)

    def _gate_inner(self, inner: Any) -> None:
        step = inner.step

        def gated(*args: Any, **kwargs: Any) -> Any:
            def update() -> bool:
                step(*args, **kwargs)
                return True

            return self._gate.around_update(update, inner, (), {})

        inner.step = gated


def _let_gather(model: list[Any], optimizer: Any) -> None:
    """Give the model chunks what repair calls on later Megatrons to gather parameters; the first does it for all."""
    from megatron import get_args, get_timers

    class Options:
        """Stands for the options of a later DistributedDataParallel."""

        use_distributed_optimizer = True

    def gather(*, force_sync: bool) -> None:
        optimizer.gather_model_params(get_args(), get_timers())

    model[0].ddp_config = Options
    model[0].start_param_sync = gather
