"""A rank of a plan that `partc plan --try` runs: steps of random inputs; rank 0 prints the median step time of the slowest rank.

The launcher starts it as `python -P -m partc.cli.machine.trial_rank FOLDER`; `FOLDER/build` is the artifact, `FOLDER/sizes.json` has the
sizes of its symbols.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from partc.cli.job.inputs import open_inputs
from partc.cli.machine.job import report
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.communication.transport import Transport
from partc.runtime.execution.inputs import shard

REQUEST = "sizes.json"
_SEED, _WARM, _FEWEST, _MOST, _SECONDS = 7, 3, 3, 500, 0.5


def main() -> int:
    """Runs the rank; returns the exit code."""
    return report(partial(_found, Path(sys.argv[1])))


def _found(folder: Path, transport: Transport) -> dict[str, float]:
    from partc.runtime import load, load_trainer

    manifest, sizes = open_artifact(folder / "build", trust=True).manifest, json.loads((folder / REQUEST).read_text())
    training = manifest.training
    told = () if training is None else training.scalars
    ports = [port for port in manifest.inputs if transport.rank in port.ranks and port.name not in told]
    whole = open_inputs(manifest, [], _SEED, sizes).read([port.name for port in ports])
    batch = {port.name: shard(port, transport.rank, whole[port.name]) for port in ports}

    def slowest(seconds: float) -> float:
        return max(map(float, transport.all_gather_text(str(seconds))))

    with contextlib.ExitStack() as stack:
        step: Callable[[], object]
        if training is None:
            step = partial(stack.enter_context(load(folder / "build", transport, trust=True)), **batch)
        else:
            step = partial(stack.enter_context(load_trainer(folder / "build", transport, trust=True)).train, batch)
        first = slowest([_taken(step) for _ in range(_WARM)][-1])
        steps = min(_MOST, max(_FEWEST, round(_SECONDS / first)))
        return {"seconds": slowest(median(_taken(step) for _ in range(steps)))}


def _taken(step: Callable[..., object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
