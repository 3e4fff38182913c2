"""What the controller's decisions depend on beside the roster."""

from __future__ import annotations

from dataclasses import dataclass

from mindio_tft_patch.config import Config


@dataclass(frozen=True)
class Options:
    """Durations in seconds.

    Attributes:
        heartbeats_missed: heartbeats after which a rank counts as silent.
        hang_seconds: least time without progress that counts as a hang.
        collect_seconds: window in which reports are gathered before a decision.
        return_seconds: how long a process that is started anew is waited for.
        restart_budget: recoveries in place over the life of the job.
        manager_seconds: how long the cluster manager, when there is one, is waited for.
        restarts: processes may be started anew (the SDK has a switch for it in the controller too).
    """

    world_size: int
    heartbeat_seconds: float = 1.0
    heartbeats_missed: int = 3
    hang_seconds: float = 60.0
    collect_seconds: float = 0.15
    phase_timeout_seconds: float = 180.0
    dump_timeout_seconds: float = 120.0
    return_seconds: float = 300.0
    restart_budget: int = 100
    manager_seconds: float = 30.0
    restarts: bool = True

    @property
    def silence_seconds(self) -> float:
        """Time without heartbeat after which a rank counts as silent."""
        return self.heartbeats_missed * self.heartbeat_seconds


def options_of(config: Config, world_size: int, *, restarts: bool = True) -> Options:
    """The part of the configuration that decisions depend on.

    Args:
        restarts: processes may be started anew.
    """
    return Options(
        world_size=world_size,
        heartbeat_seconds=config.heartbeat_seconds,
        heartbeats_missed=config.heartbeats_missed,
        hang_seconds=config.hang_seconds,
        collect_seconds=config.collect_seconds,
        phase_timeout_seconds=config.phase_timeout_seconds,
        dump_timeout_seconds=config.dump_timeout_seconds,
        return_seconds=config.return_seconds,
        restart_budget=config.restart_budget,
        manager_seconds=config.cluster_manager_wait_seconds,
        restarts=restarts,
    )
