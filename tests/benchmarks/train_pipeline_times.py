"""The steps of a pipeline's ranks, timed task by task under MPI; started by `train_pipeline.py`.

    mpiexec -n 2 python train_pipeline_times.py FOLDER

Writes at the end FOLDER/times.json, the profile that `partc train --profile` writes, and FOLDER/memory_<rank>.json with `peak`, the most
resident memory in MB beyond what the process had before the artifact was loaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi4py import MPI
from partc.cli.job.profile import write_profile
from partc.runtime import load_trainer
from train_cases import feeds
from train_memory_report import Memory
from transformer_partc import told_all
from turns import serve

FIRST = 3
"""Steps that a profile leaves out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    memory = Memory()
    with load_trainer(options.folder / "build", comm, threads=1) as trainer:
        wanted = {port.name for port in trainer.inputs}
        batch = {name: array for name, array in feeds(options.folder, 0).items() if name in wanted}
        profiler = trainer.program.record_times()
        for _ in range(FIRST):
            trainer.train(batch)

        def step() -> None:
            comm.Barrier()
            trainer.train(batch)

        serve(step, told_all(comm), comm.rank == 0)
        ranks = trainer.program.all_gather_text(profiler.text())
        if comm.rank == 0:
            write_profile(str(options.folder / "times.json"), ranks, quiet=True)
        (options.folder / f"memory_{comm.rank}.json").write_text(memory.said())


if __name__ == "__main__":
    main()
