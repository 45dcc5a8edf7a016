"""What candidates of a search take at least, each on the machine as its ranks find it."""

from __future__ import annotations

from collections.abc import Callable

from partc.cli.simulation.least import Least
from partc.cli.simulation.step import Simulation
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.search import Search


class Leasts:
    """What candidates take at least, each on the machine as its ranks find it, of whose host more or fewer of them work."""

    def __init__(self, search: Search, whole: Simulation) -> None:
        self.search, self.whole = search, whole
        self._learned: list[tuple[Candidate, Simulation]] = []
        self._of: dict[int, Least] = {}

    def on(self, ranks: int) -> Least:
        """For candidates on so many ranks."""
        request = self.search.request
        busy = request.machine.busy(ranks, request.hosts)
        if busy not in self._of:
            found = self._of[busy] = Least(self.search, self.whole, request.machine.among(busy))
            for pair in self._learned:
                found.learn(*pair)
        return self._of[busy]

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes the program of a candidate over `tp` that was played."""
        self._learned.append((one, simulation))
        for found in self._of.values():
            found.learn(one, simulation)

    @property
    def levels(self) -> tuple[Callable[[Candidate], float], ...]:
        """What gives seconds that no step of a candidate is below: each is nearer than the one before, and takes longer."""
        return self.quick, self.ways, self

    def quick(self, one: Candidate) -> float:
        """As `Least.quick`."""
        return self.on(one.degrees.ranks).quick(one)

    def ways(self, one: Candidate) -> float:
        """As `Least.ways`."""
        return self.on(one.degrees.ranks).ways(one)

    def __call__(self, one: Candidate) -> float:
        """Seconds that no step of a candidate is below."""
        return self.on(one.degrees.ranks)(one)

    def updating(self, ranks: int, share: float) -> float:
        """As `Updating.played`, on a rank of so many."""
        return self.on(ranks).updating.played(share)

    def computed(self, one: Candidate) -> float | None:
        """As `Least.computed`."""
        return self.on(one.degrees.ranks).computed(one)
