"""The enumerations of the SDK, with the numbers of the original."""

from __future__ import annotations

from enum import Enum


class OptimizerType(Enum):
    """Which optimizer a replica set, a repair or a save belongs to: its place in what tft_set_optimizer_replica got."""

    ATTENTION = 0
    MOE = 1


class Action(Enum):
    """What a main thread does after it has reported a fault: what tft_wait_next_action returns."""

    RETRY = 0  # repaired: call the training function again
    EXIT = 1  # the job ends


class ReportState(Enum):
    """What a main thread reports when it has left the training function."""

    RS_NORMAL = 0  # it was stopped (FORCE STOP)
    RS_RETRY = 1  # numbers went wrong: what every rank holds is suspect
    RS_UCE = 2  # memory error of the device
    RS_UCE_CORRUPTED = 3  # memory error whose damage may be in every rank's state
    RS_HCCL_FAILED = 4  # communication failed
    RS_INIT_FINISH = 5  # MindSpore: a process that has come back is set up
    RS_PREREPAIR_FINISH = 6  # the same elsewhere (ARF FINISH)
    RS_STEP_FINISH = 7  # it holds at the end of a step (STEP FINISH)
    RS_UNKNOWN = 8  # anything else


class RepairType(Enum):
    """What the repair callback is to do on this rank."""

    RT_SEND = 0  # send to the ranks of `dst`
    RT_UCE_HIGHLEVEL = 1  # rebuild model and optimizer, then receive
    RT_UCE_LOWLEVEL = 2  # receive
    RT_RECV_REPAIR = 3  # a process that has come back, or a rank that lags: receive
    RT_ROLLBACK = 4  # in the original the type of a rollback; never given to the repair callback
    RT_LOAD_CKPT = 5  # load the last periodic checkpoint
    RT_LOAD_REBUILD = 6  # rebuild model and optimizer, then load it
