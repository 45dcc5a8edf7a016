"""Random graphs of what is risky with random plans: inputs that are outputs, weights used in several ways, strings, sequences, dims of 0,
functions, loops, captured values, unknown shapes, names as partc derives them; groups that overlap, and ranks in any order. A quarter
of the plans train (`random_losses.py`).

    python tests/fuzz/random_cases.py --cases 3000 --seed 1 --save failures/

Prints how many cases are equal to the unsharded model, or learn as it does, refused by the compile (and why), and wrong: refused by
the runtime or by `partc check`, different, or a traceback. A wrong case is saved as a folder with its model, plan and inputs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from partc.compiler.errors import CompileError
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import PartcError

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from equivalence import compiled, same, whole_outputs
from random_losses import LOSS, train, with_loss
from random_placement_case import delivered
from risky_graphs import CALLING, FLOAT, RECORDS, Case, Risky, twice

EQUAL, REFUSED = "equal", "refused by the compile"
WRONG = ("refused by the runtime", "refused by check", "different", "traceback", "the compile's own fault")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    graph = Risky(draw)
    for _ in range(draw(st.integers(1, 8))):
        graph.risk()
    read = {name for node in graph.nodes for name in node.input}
    kept = [value for value in graph.values[2:] if value[0] not in read or draw(st.integers(0, 5)) == 0]
    kept += [value for value in graph.values[:2] if draw(st.integers(0, 5)) == 0] or ([] if kept else graph.values[:1])
    outputs = {name: (FLOAT, ["batch", width]) for name, width in kept}
    outputs |= {name: (kind, None) for name, kind in graph.outputs}
    learning = []
    if draw(st.integers(0, 3)) == 0:
        ends = [name for name, (kind, _) in outputs.items() if kind == FLOAT]
        learning = with_loss(draw, graph, ends)
        outputs[LOSS] = (FLOAT, [])
    inputs = [helper.make_tensor_value_info(name, FLOAT, ["batch", width]) for name, width in (("x", 3), ("z", 5))]
    if graph.text:
        inputs.append(helper.make_tensor_value_info("words", TensorProto.STRING, ["batch"]))
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "risky", inputs, ports, graph.weights),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
        functions=[twice()] if graph.called else [],
    )
    return Case(proto, "\n".join([*_plan(draw, graph), *learning, ""]))


def _plan(draw: st.DrawFn, graph: Risky) -> list[str]:
    ranks = draw(st.sampled_from([2, 3, 4, 6]))
    lines = [f"ranks: {ranks}", f"symbols: {{batch: {{divisor: {RECORDS}}}}}"]
    lines.append(
        f"dataset: {draw(st.sampled_from(['full_batch', 'data_parallel', 'data_parallel', *(['{x: [2, 1]}'] if ranks % 2 == 0 else [])]))}"
    )
    lines.append(delivered(draw, ranks))
    groups = {node.name: _group(draw, ranks) for node in graph.nodes if draw(st.integers(0, 3)) == 0}
    lines += ["placement:", *(f"  {name}: {group}" for name, group in groups.items())] if groups else []
    cut = []
    for node in graph.nodes:
        size = len(groups.get(node.name, range(ranks)))
        if size > 1 and node.name in graph.rows and draw(st.integers(0, 7)):
            cut.append(
                f"  {node.name}: {draw(st.sampled_from(['rowwise', '{in: [[1, 2], [2, 1]]}' if size % 2 == 0 else 'rowwise']))}"
            )
        elif size > 1 and draw(st.integers(0, 4)) == 0:
            pieces = [n for n in range(1, size + 1) if size % n == 0]
            cut.append(f"  {node.name}: {_cut(draw, node, pieces, graph.shapes)}")
    return [*lines, *(["sharding:", *cut] if cut else [])]


def _group(draw: st.DrawFn, ranks: int) -> list[int]:
    order = draw(st.permutations(range(ranks)))
    return list(order[: draw(st.integers(1, ranks))])


def _cut(draw: st.DrawFn, node: onnx.NodeProto, pieces: list[int], shapes: dict[str, list[int]]) -> str:
    """A strategy: mostly one that the node can take, of records or by numbers that divide a size."""
    operands = [name for name in node.input if name]
    known = [k for k, name in enumerate(operands) if shapes.get(name)]
    if not known or node.op_type in CALLING or draw(st.integers(0, 7)) == 0:
        styles = ["colwise"] if node.op_type == "MatMul" else []
        return draw(st.sampled_from(["replicate", "replicate", "{out: [[2, 1]]}", *styles]))
    cuts, k = ["null"] * len(operands), draw(st.sampled_from(known))
    sizes = shapes[operands[k]]
    numbers = [1] * len(sizes)
    dim = draw(st.sampled_from([0, 0, *range(len(sizes))]))
    fitting = [n for n in pieces if sizes[dim] % n == 0]
    numbers[dim] = draw(st.sampled_from(fitting if draw(st.integers(0, 9)) else pieces))
    cuts[k] = str(numbers)
    return f"{{in: [{', '.join(cuts)}]}}"


def outcome(case: Case) -> tuple[str, str]:
    """What comes of a case, and the reason."""
    try:
        wanted = [whole_outputs(case.model, step) for step in case.steps()]
    except Exception as error:
        return "not run by onnxruntime", str(error)
    if "\ntrain:" in case.plan:
        return _tried(lambda: train(case))
    return _tried(lambda: _run(case, wanted))


def _tried(run: Callable[[], None]) -> tuple[str, str]:
    """What comes of a run, and the reason."""
    try:
        run()
    except CompileError as error:
        own = "a bug in partc" in str(error)
        return "the compile's own fault" if own else REFUSED, str(error)
    except Refused as error:
        return "refused by check", str(error)
    except PartcError as error:
        return "refused by the runtime", str(error)
    except AssertionError as error:
        return "different", str(error)
    except Exception:
        return "traceback", traceback.format_exc()
    return EQUAL, ""


class Refused(Exception):
    """The checker does not accept what was written."""


def _run(case: Case, wanted: list[dict[str, Any]]) -> None:
    """Compiles and runs on all ranks, and compares with the outputs of the unsharded model."""
    with tempfile.TemporaryDirectory() as name:
        build = Path(name) / "build"
        compiled(case.model, case.plan, build)
        if found := check_artifact(build):
            raise Refused("\n".join(map(str, found)))
        with load_local(build) as ranks:
            for step, want in zip(case.steps(), wanted, strict=True):
                have = ranks(step)
                assert set(have) == set(want), f"outputs {sorted(have)}"
                for output, value in want.items():
                    same(have[output], value, output, 1e-5, 1e-5)


def reason(text: str) -> str:
    """A refusal's kind: its fact without names and numbers."""
    line = text.splitlines()[0].split(": ", 1)[-1] if text else ""
    return re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\S*[\d@]\S*", "_", line)[:100]


def save(case: Case, folder: Path, what: str, text: str) -> None:
    """Writes a case as files: what a user would run."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(case.model, folder / "model.onnx")
    (folder / "model.txt").write_text(onnx.printer.to_text(case.model))
    (folder / "plan.yaml").write_text(case.plan)
    (folder / "output.txt").write_text(f"{what}\n{text}\n")
    for k, step in enumerate(case.steps()):
        np.savez(folder / f"inputs_{k}.npz", **step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, default=Path("failures"))
    options = parser.parse_args()
    counts, why = Counter[str](), Counter[str]()
    quiet = settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(options.seed)
    @quiet
    @given(cases())
    def run(case: Case) -> None:
        what, text = outcome(case)
        counts[what] += 1
        if what == REFUSED:
            why[reason(text)] += 1
        elif what != EQUAL:
            save(case, options.save / f"{what.replace(' ', '_')}_{options.seed}_{counts.total()}", what, text)

    run()
    for what, count in counts.most_common():
        print(f"{count:6d}  {what}")
    for text, count in why.most_common(40):
        print(f"{count:6d}    {text}")
    raise SystemExit(any(counts[what] for what in WRONG))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    main()
