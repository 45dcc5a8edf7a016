"""A few of the cases of `kills.py`: a stopped rank is told of, and whoever is killed or leaves, nothing stays behind.

The launcher of a run is killed by the one case that `test_fuzz.py` has that script draw.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kill_case import judged
from kill_job import Act, Case, make

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="reads /proc, and the environment needs an mpiexec of its own",
)
CASES = [
    Case("train", 2, "stepping", Act("SIGSTOP", "rank", 1), 0.6),  # then partc itself is killed outright
    Case("train", 2, "stepping", Act("os._exit", "user", 1), 0.3),
    Case("pipeline", 2, "stepping", Act("SIGKILL", "rank", 1), 0.1),
    Case("train", 2, "starting", Act("SIGSTOP", "launcher")),  # before a rank has begun; then SIGTERM to partc
    Case(
        "train", 2, "stepping", Act("SIGSTOP", "launcher"), 0.2
    ),  # then SIGTERM: the ranks save and end, the launcher cannot
]


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    return make(tmp_path_factory.mktemp("works"), [(case.mode, case.ranks) for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_ends_in_order_whatever_happens_to_it(
    case: Case, works: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    verdict = judged(case, works[case.mode, case.ranks], tmp_path / "job", stall=0.5, start=8.0)
    assert not verdict.problems, (tmp_path / "job" / "out").read_text()
    assert not verdict.over
