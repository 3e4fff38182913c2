"""The matrix of faults that the tiny trainer survives, from the parts of support.in_place_matrix. Nothing runs here."""

from __future__ import annotations

from support.in_place_matrix import KINDS, MOMENTS, Case, Packed, pack

RANKS = 4
# Megatron has a data loader with a moment of its own, and evaluations.
_NOT_HERE = ("loader", "evaluate", "gather", "afterwards")
# Slow, or a job of their own: at each moment in one of the topologies only.
_RARE = ("sigstop", "exception")


def _case(topology: str, rank: int, kind: str, moment: str) -> Case:
    return Case(topology, "tiny", rank, KINDS[kind], MOMENTS[moment])


def every_case() -> list[Case]:
    """Every kind at every moment in both topologies, on ranks that take turns."""
    cases: list[Case] = []
    for shift, topology in enumerate(("dp4", "tp2dp2")):
        turn = shift
        for kind in KINDS.values():
            fitting = [name for name in kind.moments if name not in _NOT_HERE]
            for number, moment in enumerate(fitting):
                if kind.name in _RARE and number % 2 != shift:
                    continue
                turn += 1
                cases.append(_case(topology, (turn + number) % RANKS, kind.name, moment))
    return cases


JOBS = pack(every_case())
LASTING = [packed for packed in JOBS if not packed.ends]
ENDING = [packed for packed in JOBS if packed.ends]

# What `make test` runs.
SAMPLE = Packed(
    (
        (_case("dp4", 1, "sigkill", "forward"), 3),
        (_case("dp4", 2, "exit", "save"), 5),
        (_case("dp4", 0, "memory_moments", "in_update"), 7),
        (_case("dp4", 2, "broken_sockets", "backward"), 9),
        (_case("dp4", 3, "sigstop", "before_gate"), 11),
        (_case("dp4", 0, "sigkill", "after_gate"), 13),
    ),
    0,
    standby=False,
)
