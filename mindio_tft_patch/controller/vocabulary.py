"""The words and numbers of the cluster manager (MindCluster's TaskD), and what they are here. Pure data.

Source: the SDK's API reference, tft_register_mindx_callback and tft_notify_controller_*.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mindio_tft_patch.controller.decide import root_causes
from mindio_tft_patch.controller.roster import Fault
from mindio_tft_patch.protocol.phases import FaultKind, Strategy

RETRY, RECOVER, DUMP, EXIT, CONTINUE = "retry", "recover", "dump", "exit", "continue"

# In the order of the ladder: the manager is told them in this order.
STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    RETRY: (Strategy.RETRY,),
    RECOVER: (Strategy.RESPAWN, Strategy.RELOAD),
    DUMP: (Strategy.DUMP,),
    EXIT: (Strategy.EXIT,),
}


class FaultType(IntEnum):
    """What a faulty rank has. The reference knows 0 and 1; the SDK's own controller and its manager also use 2."""

    MEMORY = 0
    OTHER = 1  # the process is lost, or is to be ended
    NETWORK = 2


class Code(IntEnum):
    """How something ended."""

    GOOD = 0
    ERROR = 400  # of a stop: it was not carried out
    WRONG_ORDER = 403  # of a stop: something else is going on
    NOT_READY = 404  # of a stop: ranks have not finished their set-up
    RECOVER_LEFT = 405  # of a strategy: it failed; recover, dump and exit are possible
    DUMP_LEFT = 406  # it failed; dump and exit are possible
    EXIT_LEFT = 499  # it failed; only exit is possible


_KINDS = {
    FaultType.MEMORY: FaultKind.MEMORY,
    FaultType.OTHER: FaultKind.DECLARED,
    FaultType.NETWORK: FaultKind.NETWORK,
}
_TYPES = {
    FaultKind.MEMORY: FaultType.MEMORY,
    FaultKind.NETWORK: FaultType.NETWORK,
    FaultKind.COLLATERAL: FaultType.NETWORK,
}
_GRAVITY = (FaultType.NETWORK, FaultType.MEMORY, FaultType.OTHER)


def kind_of(number: int) -> FaultKind:
    """What the manager means by a number.

    Raises:
        ValueError: it is none of the documented ones.
    """
    return _KINDS[FaultType(number)]


def ranks_of(faults: Sequence[Fault]) -> dict[int, int]:
    """The faulty ranks with their type, as the manager is told them: causes only, the gravest of each rank."""
    found: dict[int, FaultType] = {}
    for fault in root_causes([fault for fault in faults if fault.rank is not None]):
        assert fault.rank is not None
        mine = _TYPES.get(fault.kind, FaultType.OTHER)
        found[fault.rank] = max(found.get(fault.rank, mine), mine, key=_GRAVITY.index)
    return {rank: int(found[rank]) for rank in sorted(found)}


def word_of(strategy: Strategy) -> str:
    """The manager's word for a strategy."""
    return next(word for word, group in STRATEGIES.items() if strategy in group)
