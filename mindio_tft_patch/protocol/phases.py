"""THE PATH of a fault, as data.

    detected -> reported -> decided -> stop -> clean -> rebuild -> repair -> rollback -> resume
                                            \\-> dump -> exit

    training -> pause -> training      (no fault: a cluster manager wants the job to hold still for a while)

A recovery is a walk along one `PATHS[strategy]`. The controller sends the phase, every rank that takes part runs the
handler method of the same name (processor.handlers.Handlers), in the file of the same name in an adaptor, and answers
`Done` or `Failed`; the controller then sends the next phase. What a phase does on a rank is not known here.

`LADDER` says what is tried next when a strategy does not fit or fails. `exit` needs nothing and cannot fail.
"""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """One step of a recovery, as carried out by every participating rank."""

    STOP = "stop"  # leave the training step: blocked collectives raise, the main thread comes to the guard
    CLEAN = "clean"  # drop pending handles and caches; finish a local update that other ranks have passed the gate for
    REBUILD = "rebuild"  # make the communication between the ranks work again, in place
    REPAIR = "repair"  # fill a rank's state from a healthy replica
    ROLLBACK = "rollback"  # bring step, samples, scheduler, RNG, iterators to the target step
    RESUME = "resume"  # enter train() again
    DUMP = "dump"  # write the dying-gasp checkpoint of the target step
    EXIT = "exit"  # end the process with the reason
    PAUSE = "pause"  # on no path, since nothing is wrong: hold between two steps until RESUME


class Strategy(str, Enum):
    """How a fault is dealt with; ordered by how much of the job it keeps."""

    RETRY = "retry"  # every process lives: recompute the step in place
    RESPAWN = "respawn"  # some ranks come back as new processes
    RELOAD = "reload"  # all ranks load the last checkpoint in place
    DUMP = "dump"  # survivors write the last completed step, the job ends
    EXIT = "exit"  # nothing can or need be saved, the job ends


PATHS: dict[Strategy, tuple[Phase, ...]] = {
    Strategy.RETRY: (Phase.STOP, Phase.CLEAN, Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME),
    Strategy.RESPAWN: (Phase.STOP, Phase.CLEAN, Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME),
    Strategy.RELOAD: (Phase.STOP, Phase.CLEAN, Phase.REBUILD, Phase.ROLLBACK, Phase.RESUME),
    Strategy.DUMP: (Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT),
    Strategy.EXIT: (Phase.STOP, Phase.EXIT),
}

LADDER: tuple[Strategy, ...] = (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP, Strategy.EXIT)


class FaultKind(str, Enum):
    """What happened to a rank, as classified by processor.detect or seen by the agent."""

    PROCESS_DEATH = "process_death"  # the process ended or was killed
    HEARTBEAT_LOST = "heartbeat_lost"  # no sign of life, and no agent that could say more
    HANG = "hang"  # no progress; this rank is the culprit
    MEMORY = "memory"  # on-chip memory error of the device
    NETWORK = "network"  # communication between ranks broke
    COLLATERAL = "collateral"  # this rank only suffers from another rank's fault (a peer closed the connection)
    TERMINATED = "terminated"  # somebody asked the rank or the job to end (SIGTERM)
    EXCEPTION = "exception"  # anything else that user code or the framework raised
    CORRUPTION = "corruption"  # the holders of a shard disagree: silent corruption
    DECLARED = "declared"  # the cluster manager says that the rank is faulty; it ends the process and starts another


class Activity(str, Enum):
    """What a rank's main thread is doing; reported in every heartbeat."""

    SETUP = "setup"  # before the first step; long work is normal
    COMPUTE = "compute"  # forward, backward, gradient reduction
    GATE = "gate"  # waiting at the commit gate
    UPDATE = "update"  # local optimizer update
    GATHER = "gather"  # parameter all-gather after the update
    BETWEEN = "between"  # logging and the like between steps
    EVALUATE = "evaluate"
    SAVE = "save"
    RECOVERY = "recovery"  # in the guard, obeying the controller
    PAUSE = "pause"  # holds between two steps, because the controller says so
    FINISHED = "finished"  # training has ended
