"""A rank of a plan that `partc plan --try` runs: steps of random inputs; rank 0 prints what the median step of the slowest rank takes.

The launcher starts it as `python -P -m partc.cli.machine.trial_rank FOLDER`; `FOLDER/build` is the artifact, `FOLDER/sizes.json` has the
sizes of its symbols.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from partc.cli.job.inputs import open_inputs
from partc.cli.job.processes import end_with_parent
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.errors import PartcError
from partc.runtime.execution.inputs import shard

REQUEST = "sizes.json"
_SEED, _WARM, _FEWEST, _MOST, _SECONDS = 7, 3, 3, 500, 0.5


def main() -> int:
    """The exit code."""
    end_with_parent(signal.SIGKILL)
    try:
        _run(Path(sys.argv[1]))
    except PartcError as error:
        print(str(error).partition("\n")[0], file=sys.stderr, flush=True)
        return 1
    return 0


def _run(folder: Path) -> None:
    from mpi4py import MPI
    from partc.runtime import load, load_trainer

    comm = MPI.COMM_WORLD
    artifact = open_artifact(folder / "build", trust=True)
    manifest, sizes = artifact.manifest, json.loads((folder / REQUEST).read_text())
    training = manifest.training
    told = () if training is None else training.scalars
    ports = [port for port in manifest.inputs if comm.rank in port.ranks and port.name not in told]
    whole = open_inputs(manifest, [], _SEED, sizes).read([port.name for port in ports])
    batch = {port.name: shard(port, comm.rank, whole[port.name]) for port in ports}
    with contextlib.ExitStack() as stack:
        step: Callable[[], object]
        if training is None:
            step = partial(stack.enter_context(load(folder / "build", comm, trust=True)), **batch)
        else:
            step = partial(stack.enter_context(load_trainer(folder / "build", comm, trust=True)).train, batch)
        first = max(comm.allgather([_taken(step) for _ in range(_WARM)][-1]))
        steps = min(_MOST, max(_FEWEST, round(_SECONDS / first)))
        seconds = max(comm.allgather(median(_taken(step) for _ in range(steps))))
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds}), flush=True)


def _taken(step: Callable[..., object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
