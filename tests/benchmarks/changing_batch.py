"""A step whose batch size differs from the step before, against one of the same size as the two before; one artifact.

    python tests/benchmarks/changing_batch.py [--batches 1,2,3,4,5,6,7,8,9,10,11,12]

The transformer of `transformer.py` with a dynamic batch, cut over two MPI ranks. In one turn every step has another size than
the last, in the next each size is run three times and the third is counted. Both sides run the same sizes, in one process, in
turns; twelve sizes are more than the runtime keeps step plans of, so that the changing side resizes one in every step. Prints the
ratio of the sums over sizes of the medians (at most 1.05 wanted) and of the fastest, and the same with four sizes, which are
kept. On a machine that is busy otherwise the ratio says nothing: look whether it is near 1 with four sizes.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from network import Sizes, generate, plan
from transformer import HERE, ROOT, mpi_command
from turns import Side

_REPEATED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 512), ("heads", 8), ("sequence", 128), ("ranks", 2), ("turns", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batches", default="1,2,3,4,5,6,7,8,9,10,11,12")
    options = parser.parse_args()
    from partc.compiler import compile_model

    every = options.batches.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = generate(folder, Sizes(options.layers, options.width, options.heads, options.sequence))
        (folder / "plan.yaml").write_text(plan(options.ranks))
        compile_model(model, folder / "plan.yaml", folder / "build")
        shape = (max(map(int, every)), options.sequence, options.width)
        np.save(folder / "x.npy", np.random.default_rng(1).standard_normal(shape, dtype=np.float32))
        command = [str(HERE / "transformer_partc.py"), name, "--batches"]
        for batches in (every, every[2:6]):
            side = Side("partc", [mpi_command(options.ranks, *command, ",".join(batches))], [ROOT])
            found: dict[int, list[list[float]]] = {1: [], _REPEATED: []}
            for turn in range(options.turns + 1):
                for repeated, rows in found.items():
                    row = side.turn(repeated)
                    rows += [row] if turn else []
            side.close()
            changing, fixed = (1e3 * sum(map(statistics.median, zip(*rows, strict=True))) for rows in found.values())
            fastest = [sum(map(min, zip(*rows, strict=True))) for rows in found.values()]
            print(
                f"batches {', '.join(batches)}, {options.ranks} ranks on {os.cpu_count()} cores: changing {changing:.1f} ms, "
                f"fixed {fixed:.1f} ms, ratio {changing / fixed:.3f} (at most 1.05 wanted)"
                f", of the fastest {fastest[0] / fastest[1]:.3f}"
            )


if __name__ == "__main__":
    main()
