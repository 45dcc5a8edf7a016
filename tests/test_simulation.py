"""Simulated ranks, in interleavings that seeds decide: every run ends equal or refused with the right rank, and planted faults are found.

A seed that fails is replayed by `python tests/simulation/run.py --seed SEED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.planted import PLANTED, Planted
from simulation.run import shortest
from simulation.samples import SAMPLES
from simulation.session import Session

RUNS, TRIES = 15, 60
NAMES = [sample.name for sample in SAMPLES]
Sessions = dict[str, Session]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    folder = tmp_path_factory.mktemp("simulated")
    found = {sample.name: Session(sample, folder / sample.model) for sample in SAMPLES}
    yield found
    for session in found.values():
        session.close()


@pytest.mark.parametrize("name", NAMES)
def test_runs_end_equal_or_refused(name: str, sessions: Sessions) -> None:
    for number in range(RUNS):
        seed = number * len(NAMES) + NAMES.index(name)
        found = sessions[name].seeded(seed)
        assert found.problems == [], f"python tests/simulation/run.py --seed {seed}"


def test_a_seed_is_the_same_run_each_time(sessions: Sessions, tmp_path: Path) -> None:
    name = "pipeline"
    again = Session(SAMPLES[NAMES.index(name)], tmp_path)
    for seed in range(5):
        first = sessions[name].seeded(seed, traced=True)
        assert first.trace
        assert first == sessions[name].seeded(seed, traced=True) == again.seeded(seed, traced=True)
    again.close()


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted, sessions: Sessions) -> None:
    session = sessions[fault.sample]
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(session, patch)
        session.renew()
        runs = (session.seeded(seed) for seed in range(TRIES))
        found = next((run for run in runs if any(fault.words in problem for problem in run.problems)), None)
        assert found is not None, f"{TRIES} runs did not find it"
        assert session.seeded(found.seed).problems == found.problems
        least = shortest(session, found.seed)
        assert least.problems
        assert least.decisions <= found.decisions
    session.renew()
    assert session.seeded(found.seed).problems == []
