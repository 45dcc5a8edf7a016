"""What `step_parallel_end.ir` tells of every op and parameter of a rank: its strategy, its cuts, its part, and types throughout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from partc.compiler.emit.dump import begin_text, end_text
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute
from shard_call_models import compiled

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter([24, 16], init=nn.init.normal(0.1))
        self.fc = nn.Linear(16, 10)

    def forward(self, op, x):
        return self.fc(op, op.Tanh(shard(op.MatMul, in_strategy=((2, 3), (3, 1)))(op.Transpose(x, perm=[1, 0]), self.w)))

model = Net()
inputs = {"x": [24, ROWS]}
"""
LINE = "plan.yaml:2 'fc'"


def program_of(folder: Path, rows: str, more: str = "") -> Complete:
    symbols = "symbols: {n: {divisor: 6}}\n" if rows == '"n"' else ""
    plan = f"ranks: 6\nsharding: {{fc: {{in: [[6, 1]]}}}}\n{symbols}{more}"
    return compiled(folder, NET.replace("ROWS", rows), plan).program


def of(text: str, name: str) -> list[str]:
    """The lines of an op's first appearance."""
    lines = text.splitlines()
    (at, *_) = [k for k, line in enumerate(lines) if line.startswith(f"  %{name} = ")]
    end = next(k for k in range(at + 1, len(lines)) if not lines[k].startswith("      "))
    return [line.strip() for line in lines[at:end]]


def test_an_op_shows_its_strategy_and_who_cut_it(tmp_path: Path) -> None:
    program = program_of(tmp_path, "12")
    text = end_text(program)
    assert text.startswith("# partc step_parallel_end, grammar 4\n")
    assert of(text, "MatMul.partial") == [
        "%MatMul.partial = MatMul(%Transpose, %w) {in_strategy: ((2, 3), (3, 1))}",
        ": (<tensor(float), (6, 8)>, <tensor(float), (8, 16)>) -> (<tensor(float), (6, 16)>)",
        "# Scope: MatMul   Rule: model.py:10 'MatMul'",
        "# Sharded: m in 2 by model.py:10, k in 3 by model.py:10",
    ]
    assert "{in_strategy: ((6, 1), (1, 1), (1))}" in of(text, "output@[6, 1]")[0]
    assert of(text, "output@[6, 1]")[-1] == "# Sharded: m in 6 by plan.yaml:2"
    assert [line.strip() for line in begin_text(program).splitlines() if "# Sharded: m in 2" in line] == [
        "# Sharded: m in 2 by model.py:10, k in 3 by model.py:10"
    ]


def test_a_parameter_shows_which_part_of_it_a_rank_has(tmp_path: Path) -> None:
    program = program_of(tmp_path, "12")
    found = re.findall(r"# Parameter: %w .*", end_text(program))
    assert found == [
        f"# Parameter: %w : <tensor(float), (8, 16)>   512 bytes   Shard: [{begin}:{begin + 8}, 0:16] of (24, 16)"
        for begin in (0, 8, 16, 0)  # ranks 1 and 4 do the same, and 2 and 5
    ]
    assert not re.search(r"%fc.weight .*Part", end_text(program))


def test_what_is_kept_shows_its_part(tmp_path: Path) -> None:
    more = "train: {loss: {type: mean_squared, prediction: output, target: t}, optimizer: {type: adam, lr: 0.1}}\n"
    text = end_text(program_of(tmp_path, "12", more))
    assert "# State: %w.exp_avg : <tensor(float), (8, 16)>   Shard: [16:24, 0:16] of (24, 16)   next: " in text
    assert "<>" not in text


@pytest.mark.parametrize("rows", ["12", '"n"'])
def test_bounds_of_slices_are_constants_or_typed(tmp_path: Path, rows: str) -> None:
    program = program_of(tmp_path, rows)
    assert "<>" not in end_text(program)
    kinds = {step.node.op_type for step in program.parts[3].steps if isinstance(step, Compute)}
    assert ("Shape" in kinds) == (rows == '"n"')
