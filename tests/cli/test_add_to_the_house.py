"""CONTRIBUTING.md's diffs of a schedule, a command and a pass are all that these need: applied to a copy, and used there."""

from __future__ import annotations

from pathlib import Path

from contributing import followed, output_of

BEGIN = r"""
import sys
from pathlib import Path
import onnx
import partc.cli
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan

assert partc.cli.__file__.startswith(sys.argv[1]), partc.cli.__file__

def compiled(plan, out):
    model = onnx.parser.parse_model('''
        <ir_version: 8, opset_import: ["": 21]>
        model (float[batch, 6] x) => (float[batch, 6] y) { [one] h = Relu (x) [two] y = Tanh (h) }''')
    return compile_source(Source(from_proto(model, Path("model.onnx"))), parse_plan(plan, "plan.yaml"), Path(out)).program
"""


def test_each_is_a_file_or_a_function_and_a_row(tmp_path: Path) -> None:
    """One process for all three: each begins with the imports of a compile."""
    code = r"""
staged = "ranks: 2\nsymbols: {batch: {divisor: 3}}\nplacement: {one: 0, two: 1}\n"
print(compiled(staged + "pipeline: {microbatches: 3, schedule: last_first}\n", "staged").tasks.schedule.name)
invoke(["simulate", "--schedule", "last_first", "--ranks", "2", "-m", "3"])
compiled("ranks: 1", "build")
invoke(["--help"])
invoke(["files", "build"])
try:
    compiled("ranks: 2\nplacement: {one: 0, two: 0}", "other")
except CompileError as error:
    print(error)
"""
    copy = followed(tmp_path, "Add a schedule", "Add a command", "Add a pass")
    text = output_of(copy, "-c", BEGIN + code, str(tmp_path))
    assert text.startswith("last_first\n")
    assert "0F0 0F1 0F2 0B2 0B1 0B0" in text
    assert "Show the files of an artifact." in text
    assert "rank_0000.onnx" in text
    assert "ranks [1] have nothing to do" in text
