"""Survivors of a conducted job dump, and save as many bytes with torch.save, in turns."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

from bench.conductor import ConductedJob


class DumpDuel:
    """Two ways to write the same number of bytes with the same ranks to the same disk.

    Args:
        job: has made a step; its last rank takes no part, as if it was dead.
        folder: for what is written; nothing stays.

    Attributes:
        dumps, saves: seconds of the slowest rank, by round.
        written: bytes of each survivor in the last dump; torch.save writes the same.
    """

    def __init__(self, job: ConductedJob, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._alive = list(range(job.ranks - 1))
        told = [one["sets"] for one in job.ask({"do": "tell_replica_sets"})]
        sets = sorted({(name, tuple(ranks)) for sets in told for name, ranks in sets})
        self._command = {"do": "dump_checkpoint", "faulty": [job.ranks - 1], "alive": self._alive, "sets": sets}
        self._attempts = 0
        self._parts: list[dict[str, float]] = []
        self.written: list[int] = []
        self.dumps: list[float] = []
        self.saves: list[float] = []
        # The first of each imports modules and makes connections.
        self._dump()
        self._save()
        self._parts.clear()

    def round(self, number: int) -> None:
        """One of each; who is first depends on the number."""
        if number % 2:
            self.dumps.append(self._dump())
            self.saves.append(self._save())
        else:
            self.saves.append(self._save())
            self.dumps.append(self._dump())

    def part_seconds(self) -> dict[str, float]:
        """Median seconds of each part of the dump, on the first survivor."""
        return {name: median(one[name] for one in self._parts) for name in self._parts[0]}

    def _dump(self) -> float:
        self._attempts += 1
        place = self._folder / f"dump-{self._attempts}"
        answers = self._job.ask({**self._command, "attempt": self._attempts, "save": str(place)}, self._alive)
        self.written = [one["bytes"] for one in answers]
        self._parts.append(answers[0]["parts"])
        shutil.rmtree(place)
        return max(float(one["seconds"]) for one in answers)

    def _save(self) -> float:
        writers = [(rank, size) for rank, size in zip(self._alive, self.written, strict=True) if size]
        places = {rank: self._folder / f"saved-{rank}" for rank, _ in writers}
        own = {rank: {"path": str(places[rank]), "size": size} for rank, size in writers}
        answers = self._job.ask({"do": "torch_save"}, list(places), own)
        for place in places.values():
            place.unlink()
        return max(float(one["seconds"]) for one in answers)
