"""A training step of a recommendation model with large tables against PyTorch with sparse and with dense gradients, in turns.

    python tests/benchmarks/train_tables.py [--ranks 1] [--optimizer sgd] [--rows 100000] [--width 16] [--batch 256] [--skewed]

Eight tables are looked up once a record. Prints the fastest steps and medians of all sides, the ratios, and the bytes that a rank receives
for the tables in a step by the artifact's own numbers, beside those of the tables. The first losses of all sides are compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from train_cases import LR, Case, write
from train_data_parallel import free_port, in_turns, partc_side, print_actions
from training_models import Model, dlrm
from transformer import HERE
from turns import Side

AIMS = {"sparse": 0.5, "dense": 0.2}
OPTIMIZERS = {"sgd": "", "lazy_adam": '  parameters: {"tables.*": {optimizer: lazy_adam}}\n'}


def plan(ranks: int, optimizer: str) -> str:
    """Every rank has all tables and its rows of each batch."""
    cut = f"dataset: data_parallel\nsymbols: {{batch: {{divisor: {ranks}}}}}\n" if ranks > 1 else ""
    return f"ranks: {ranks}\n{cut}train:\n  loss: loss\n  optimizer: {{type: sgd, lr: {LR}}}\n{OPTIMIZERS[optimizer]}"


def model_of(sizes: dict[str, int], skewed: bool) -> Model:
    """The model; ids are skewed as those of real categories are, or uniform."""
    one = dlrm(**sizes)

    def feeds(rng: np.random.Generator, batch: int) -> dict[str, np.ndarray]:
        found = one.feeds(rng, batch)
        drawn = np.minimum(rng.zipf(1.2, found["ids"].shape), 10**9) % sizes["rows"]
        return {**found, "ids": drawn.astype(np.int64)} if skewed else found

    return Model(one.name, one.module, one.inputs, feeds, one.sizes)


def torch_side(folder: Path, form: str, sizes: dict[str, int], options: argparse.Namespace) -> Side:
    """PyTorch on so many processes."""
    script = str(HERE / "train_tables_torch.py")
    command = [sys.executable, script, str(folder), "--form", form, "--optimizer", options.optimizer]
    command += ["--model", json.dumps(sizes)]
    common = {"OMP_NUM_THREADS": "1"}
    if options.ranks > 1:
        port = str(free_port())
        common |= {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Side(form, [command] * options.ranks, [common | {"RANK": str(rank)} for rank in range(options.ranks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("ranks", 1), ("tables", 8), ("rows", 100_000), ("width", 16), ("batch", 256)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--turns", type=int, default=6, help="of each side")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--skewed", action="store_true", help="ids as those of real categories")
    parser.add_argument("--actions", action="store_true", help="where the time of a step goes")
    options = parser.parse_args()
    sizes = {"tables": options.tables, "rows": options.rows, "width": options.width}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        case = Case(lambda: model_of(sizes, options.skewed), {"batch": options.batch}, "loss")
        report = write(folder, case, plan(options.ranks, options.optimizer), options.ranks)
        assert report.program.training is not None
        print("\n".join(report.program.training.notes.tables[:1]))
        sides = [partc_side(folder, options.ranks), *(torch_side(folder, form, sizes, options) for form in AIMS)]
        in_turns(sides, max(5, int(0.2 / statistics.median(sides[0].turn(5)))), options.turns)
        losses = [np.load(folder / name) for name in ("partc.npy", "torch_sparse.npy")]
        for side in sides:
            side.close()
        own, *others = sides
        mine = 1e3 * statistics.median(own.times)
        print(f"partc          {mine:9.3f} ms, fastest {1e3 * min(own.times):9.3f} ms")
        for side, aim in zip(others, AIMS.values(), strict=True):
            median, best = 1e3 * statistics.median(side.times), 1e3 * min(side.times)
            ratios = f"ratio {mine / median:.3f}, of the fastest {1e3 * min(own.times) / best:.3f}, aim {aim}"
            print(f"torch {side.name:8} {median:9.3f} ms, fastest {best:9.3f} ms, {ratios}")
        print(f"losses apart by {np.abs(losses[0] / losses[1] - 1).max():.1e}")
        moved = [one for one in report.manifest.collectives if "tables" in one.value or "weight" in one.cause]
        for one in moved[:4]:
            print(f"  {one.op} of {one.value}: {one.bytes} bytes a rank, {one.cause}")
        print(f"  a table has {4 * options.rows * options.width} bytes")
        if options.actions:
            print_actions(folder, options.ranks, 30)


if __name__ == "__main__":
    main()
