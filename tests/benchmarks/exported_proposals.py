"""What `partc plan` proposes for models of Hugging Face as torch exports them: communication against the ideal, results against the model.

    python tests/benchmarks/exported_proposals.py --cache FOLDER [--models llama,gpt2] [--opsets 18,21,23] [--plans FOLDER]

Needs torch and transformers, as `exported_models.py`, whose exports it takes. For each model, opset and static or dynamic sizes it
proposes `--tp 2`, `--stages 2` and both, compiles what is proposed, runs it on ranks in this process, and prints what is sent in a
step. The last column is the largest error; `+` stands in front of communication that the ideal does not have.
"""

import argparse
import collections
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from exported_models import export, reference
from exported_zoo import ZOO, Case, proposed

DEGREES = {"tp 2": (2, 1), "stages 2": (1, 2), "tp 2, stages 2": (2, 2)}


def proposed_and_compared(
    path: Path, case: Case, tp: int, stages: int, kept: Path | None
) -> tuple[collections.Counter[str], list[int], float]:
    """What is sent in a step by op, the stages' shares of the cost, and the largest error."""
    from partc.compiler import compile_model
    from partc.compiler.frontend import load
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.propose import propose
    from partc.runtime import load_local

    with contextlib.redirect_stderr(io.StringIO()):
        text, missing = propose(load(path), path.name, Degrees(tp=tp, stages=stages))
    if kept is not None:
        (kept / f"{path.stem}-{tp}-{stages}.yaml").write_text(text)
    if missing:
        raise RuntimeError(f"not recognized: {missing[0]}")
    shares = [int(share) for share in re.findall(r"# stage \d+: (\d+) % of the cost", text)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.yaml").write_text(text)
        report = compile_model(path, folder / "plan.yaml", folder / "build")
        counts = collections.Counter(event.op_type for event in report.program.events)
        inputs = {port.name: case.inputs[port.name].numpy() for port in report.manifest.inputs}
        with load_local(report.out) as program:
            have = program(inputs)
    whole = {name: tensor.numpy() for name, tensor in case.inputs.items()}
    want, _ = reference(path, case, whole, [port.name for port in report.manifest.outputs])
    error = max(float(np.abs(np.asarray(have[key]) - value).max()) for key, value in want.items())
    return counts, shares, error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--opsets", default="18,21,23")
    parser.add_argument("--sizes", default="static,dynamic")
    parser.add_argument("--proposals", default=";".join(DEGREES), help="such as 'tp 2;stages 2'")
    parser.add_argument("--plans", type=Path, help="keep the proposed plans in this folder")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    wrong = 0
    print(
        f"{'model':14} {'opset':>5} {'sizes':8} {'proposed':15} ideal; what is sent; shares of the cost; largest error"
    )
    for name in options.models.split(","):
        for opset in map(int, options.opsets.split(",")):
            for sizes in options.sizes.split(","):
                for title in options.proposals.split(";"):
                    tp, stages = DEGREES[title]
                    path, case = export(name, opset, sizes == "dynamic", options.cache)
                    ideal = collections.Counter(proposed(name, title, sizes == "dynamic"))
                    head = f"{name:14} {opset:5} {sizes:8} {title:15} {told(ideal)};"
                    try:
                        counts, shares, error = proposed_and_compared(path, case, tp, stages, options.plans)
                    except Exception as problem:
                        wrong += 1
                        print(head, f"{type(problem).__name__}: {str(problem).splitlines()[0][:150]}", flush=True)
                        continue
                    more, fewer = counts - ideal, ideal - counts
                    wrong += bool(more or fewer) or error > 1e-3
                    verdict = "ideal" if not more and not fewer else f"+{told(more)}" if more else f"-{told(fewer)}"
                    balance = f"{' '.join(f'{share}' for share in shares)}; " if shares else ""
                    print(head, f"{told(counts)} ({verdict}); {balance}{error:.0e}", flush=True)
    print(f"{wrong} not ideal, or not equal")
    return int(wrong > 0)


def told(counts: collections.Counter[str]) -> str:
    """Counts as text."""
    return ", ".join(f"{count} {op}" for op, count in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
