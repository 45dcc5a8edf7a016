"""Bodies whose turns or branch only the run knows, on four processes: values, a training, and a rank killed in a turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from body_models import BRANCHES, NESTED, WEIGHTS, WHILE, WIDTH, plan, weighed
from equivalence import compiled, whole_outputs
from mpi_ranks_case import MPIEXEC, job
from partc.runtime import describe_action
from partc.runtime.job.status_board import VARIABLE, create_board, read_board

if not MPIEXEC.exists():
    pytest.skip("no mpiexec beside this Python", allow_module_level=True)

SIZED = "from partc.runtime.execution.inputs import Whole\n"
STEPS = f"""
{SIZED}
for name in ("while", "branches", "nested"):
    steps = np.load(f"{{folder}}/{{name}}.npz")
    with runtime.load(f"{{folder}}/{{name}}", MpiTransport(MPI.COMM_WORLD), threads=1) as program:
        cut = {{port.name for port in program.inputs if port.boxes is not None}}
        for k in range(3):
            given = {{key[:-1]: steps[key] for key in steps.files if key.endswith(str(k))}}
            found = program({{key: Whole(value) if key in cut else value for key, value in given.items()}})
            if rank == 0:
                np.savez(f"{{folder}}/{{name}}.{{k}}.npz", **found)
"""
KILLED = f"""
{SIZED}
import partc.runtime.execution.bodies as bodies
turn, deadly = bodies._Body.turn, []
def perhaps(body):
    if deadly and body.turns == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return turn(body)
bodies._Body.turn = perhaps
given = {{"x": Whole(np.ones((4, {WIDTH}), np.float32)), "tolerance": np.array(0, np.float32)}}
program = runtime.load(f"{{folder}}/of two", MpiTransport(MPI.COMM_WORLD), threads=1)
program(given)
deadly += [rank] if rank == 1 else []
program(given)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("bodies")
    compiled(weighed(WHILE, WEIGHTS), plan("refine", 4), built / "while", check=False)
    compiled(weighed(WHILE, WEIGHTS), plan("refine", 2), built / "of two", check=False)
    compiled(weighed(BRANCHES, WEIGHTS), plan("choose", 4, "h"), built / "branches", check=False)
    compiled(weighed(NESTED, WEIGHTS), plan("outer.body.inner", 4), built / "nested", check=False)
    return built


def test_four_processes_take_the_turns_and_branches_of_one_device(folder: Path) -> None:
    """A while that reduces in each turn and exits early, both branches of a condition, and a branch in a loop, by messages of MPI alone."""
    random, x = np.random.default_rng(1), "x"
    numbers = {
        "while": (WHILE, x, {"tolerance": (9.0, 0.3, 0.01)}),
        "branches": (BRANCHES, "h", {"limit": (-9.0, 9.0, 0.5)}),
        "nested": (NESTED, x, {"limit": (-9.0, 0.5, 9.0), "turns": (3, 1, 4)}),
    }
    steps = dict[tuple[str, int], dict[str, np.ndarray]]()
    for name, (_, port, scalars) in numbers.items():
        for k in range(3):
            steps[name, k] = {port: random.normal(size=(4, WIDTH)).astype(np.float32)}
            kinds = {key: np.int64 if key == "turns" else np.float32 for key in scalars}
            steps[name, k] |= {key: np.array(values[k], kinds[key]) for key, values in scalars.items()}
        np.savez(folder / f"{name}.npz", **{f"{key}{k}": v for k in range(3) for key, v in steps[name, k].items()})
    result = job(folder, STEPS, 4, {"PARTC_SHARED_MEMORY": "0"})
    assert result.returncode == 0, result.stderr
    for (name, k), step in steps.items():
        have, want = np.load(folder / f"{name}.{k}.npz"), whole_outputs(weighed(numbers[name][0], WEIGHTS), step)
        assert {*have.files} == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(have[key], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} {k}: {key}")
    assert [int(np.load(folder / f"while.{k}.npz")["n"]) > 1 for k in range(3)] == [False, True, True]


def test_a_rank_killed_in_a_turn_ends_the_job(folder: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    create_board(board, 2)
    result = job(folder, KILLED, 2, {VARIABLE: str(board)})
    assert result.returncode not in (0, 1)
    assert "has waited" not in result.stderr
    step, action = read_board(board)[1]
    assert (step, describe_action(folder / "of two", 1, action)) == (2, "end of the Loop (refine.begin)")
