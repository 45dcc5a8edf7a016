"""The command `partc simulate`: one schedule, all of them compared, rows of a file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from partc.cli.main import invoke

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *arguments: str) -> str:
    assert invoke(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: str) -> str:
    assert invoke(["simulate", *arguments]) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    return heard.err


def test_one_schedule_as_rows_and_grid(capsys: Capture) -> None:
    assert said(capsys, "--schedule", "1f1b", "--stages", "2", "--microbatches", "2") == (
        """# partc schedule, grammar 2
# Schedule: 1f1b   Stages: 2   Microbatches: 2
# Stage 0: rank 0   read by 1
# Stage 1: rank 1
# Total: 9 units   Bubble: 33.33%   Overhead: 50%
# rank 0: idle 3 (33.33%), keeps 2 microbatches
# rank 1: idle 3 (33.33%), keeps 1 microbatch
# rank 0 - rank 1: 4 messages

rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1

# time  0                   5
rank 0 |0F0 0F1 .   .   0B0 --- .   0B1 --- |
rank 1 |.   1F0 1B0 --- 1F1 1B1 --- .   .   |
"""
    )


def test_all_schedules_compared(capsys: Capture) -> None:
    lines = said(capsys, "--ranks", "4", "-m", "8").splitlines()
    assert [line.split() for line in lines[1:8]] == [
        ["gpipe", "0,1,2,3", "33", "27.27%", "37.5%", "8", "48"],
        ["1f1b", "0,1,2,3", "33", "27.27%", "37.5%", "4", "48"],
        ["zb_h1", "0,1,2,3", "27", "11.11%", "12.5%", "4", "48"],
        ["interleaved", "0,1,2,3,0,1,2,3", "28.5", "15.79%", "18.75%", "5.5", "112"],
        ["zbv", "0,1,2,3,3,2,1,0", "25.5", "5.88%", "6.25%", "4", "96"],
        ["auto", "0,1,2,3", "27", "11.11%", "12.5%", "4", "48"],
        ["auto", "0,1,2,3,3,2,1,0", "25.5", "5.88%", "6.25%", "4", "96"],
    ]
    limited = said(capsys, "--ranks", "2", "-m", "4", "--memory", "1.5 microbatches")
    assert limited.count("over the limit") == 5
    assert limited.count("auto ") == 2


def test_json_has_the_rows_and_all_times(capsys: Capture) -> None:
    found = json.loads(said(capsys, "--schedule", "zbv", "--ranks", "2", "-m", "4", "--json"))
    assert (found["schedule"], found["total"], found["homes"]) == ("zbv", 12.5, [[0], [1], [1], [0]])
    assert found["messages"] == {"rank 0 - rank 1": 16}
    assert found["rows"][0].startswith("0F0 0F1 0F2 3F0 3B0 3W0")
    assert found["tasks"]["3B0"] == [2.0, 2.5]
    assert found["critical"].startswith("0F0 1F0")
    assert len(json.loads(said(capsys, "--ranks", "3", "-m", "2", "--json"))) == 7


def test_times_of_stages_and_messages(capsys: Capture) -> None:
    times = ["--forward", "1,1,1,1.6", "--backward", "1,1,1,1.6"]
    assert "# Total: 42.6 units" in said(capsys, "--schedule", "1f1b", "--stages", "4", "-m", "8", *times)
    assert "# Total: 36.6 units" in said(capsys, "--schedule", "auto", "--stages", "4", "-m", "8", *times)
    assert "# Total: 37.8 units" in said(capsys, "--schedule", "1f1b", "--ranks", "4", "-m", "8", "--message", "0.3")


def test_times_of_a_file(capsys: Capture, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text('{"0F": 0.25, "0B": 0.5, "1F": 0.25, "1B": 0.25, "1W": 0.25, "1F1": 1}')
    given = ["--ranks", "2", "-m", "2", "--times", str(times)]
    found = json.loads(said(capsys, "--schedule", "1f1b", *given, "--json"))
    assert found["tasks"] == {
        "0F0": [0, 0.25],
        "0F1": [0.25, 0.5],
        "1F0": [0.25, 0.5],
        "1B0": [0.5, 1],
        "1F1": [1, 2],
        "0B0": [1, 1.5],
        "1B1": [2, 2.5],
        "0B1": [2.5, 3],
    }
    assert "# Total: 2.5 s" in said(capsys, "--schedule", "zb_h1", *given)
    for wrong in ('{"2F": 1}', '{"0F": -1}', '{"F": 1}', '{"": 1}', "[]", '{"0F": "x"}', "{"):
        times.write_text(wrong)
        assert str(times) in refused(capsys, "--schedule", "1f1b", *given)


def test_rows_of_a_file(capsys: Capture, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("# mine\nrank 0: 0F0 0F1 0B0 0B1\n\nrank 1: 1F0 1B0 1F1 1B1\n")
    assert "# Total: 9 units" in said(capsys, "--rows", str(rows), "--stages", "2", "-m", "2")
    rows.write_text("# mine\nrank 0: 0F0 0F1 0B0 0B1\n\nrank 1: 1F0 1B0 1F1 1b1\n")
    assert refused(capsys, "--rows", str(rows), "--stages", "2", "-m", "2") == (
        f"""{rows}:4: rank 1, cell 4: '1b1' is not a task
    1F0 1B0 1F1 1b1
                ^^^
  a cell is a stage, F, B or W, and a microbatch, such as 2F0
  help: write 1B1
"""
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-m", "4"], "the number of ranks is not known"),
        (["-m", "0", "--ranks", "2"], "microbatches: 0 is not a number of microbatches"),
        (["-m", "4", "--ranks", "2", "--schedule", "zb-v"], "the nearest name is zbv"),
        (["-m", "4", "--stages", "3", "--schedule", "zbv"], "zbv has 2 stages per rank"),
        (
            ["-m", "4", "--stages", "3", "--ranks", "2", "--schedule", "auto"],
            "cannot be divided evenly among --ranks 2",
        ),
        (["-m", "4", "--placement", "0,2", "--schedule", "auto"], "ranks without a stage"),
        (["-m", "4", "--stages", "4", "--ranks", "2"], "leave out --stages, or give --schedule"),
        (["-m", "4", "--placement", "0,1", "--ranks", "2"], "leave out --ranks and --stages"),
        (
            ["-m", "4", "--schedule", "1f1b", "--ranks", "2", "--rows", "r.txt"],
            "--schedule and --rows are two schedules",
        ),
        (["-m", "4", "--placement", "0,x"], "'0,x' is not a list of numbers"),
        (
            ["-m", "4", "--placement", "0,1,1,0", "--schedule", "1f1b"],
            "help: place every stage on a group of its own, or write schedule: zbv or auto",
        ),
        (["-m", "4", "--ranks", "2", "--schedule", "1f1b", "--weight", "1,2,3"], "3 times for 2 stages"),
        (["-m", "4", "--ranks", "2", "--weight", "1,2"], "times of single stages need one schedule"),
        (["-m", "4", "--ranks", "2", "--memory", "0.5 microbatches"], "no schedule keeps to memory: 0.5 microbatches"),
        (["-m", "4", "--ranks", "2", "--memory", "4GB"], "sizes of stages are not known here"),
    ],
)
def test_what_is_refused(arguments: list[str], text: str, capsys: Capture) -> None:
    assert text in refused(capsys, *arguments)


def test_no_such_file_of_rows(capsys: Capture) -> None:
    assert invoke(["simulate", "--rows", "nowhere.txt", "--stages", "2", "-m", "2"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
