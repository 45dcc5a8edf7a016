"""Runs the fastest plans of a search on this host, in turns: plans that differ by less than the simulation's error must be measured."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median

from partc.cli.machine.job import result_of_module
from partc.cli.machine.trial_rank import REQUEST
from partc.cli.output import console
from partc.compiler.emit.emit import emit
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.search_state import SearchState
from partc.runtime.artifact.format import SourceRecord
from partc.runtime.errors import RankError
from partc.runtime.units import seconds

_TURNS = 5


def run_fastest(plays: SearchState) -> None:
    """Runs the requested number of plans, the fastest within the memory; records each one's step time, or the reason of its failure.

    In each turn every plan runs as a job, which loads it and makes steps of random inputs for half a second.
    """
    search, chosen = plays.search, [one.candidate for one in plays.fitting[: plays.wanted]]
    with tempfile.TemporaryDirectory(prefix="partc-plan-") as name:
        folders = {one: Path(name) / str(k) for k, one in enumerate(chosen)}
        sources = {"model": SourceRecord(name=search.name, sha256="0" * 64), "plan": None}
        for candidate, folder in folders.items():
            folder.mkdir()
            emit(search.proposal(candidate).done, folder / "build", sources)
            (folder / REQUEST).write_text(json.dumps(search.request.sizes))
        turns: dict[Candidate, list[float]] = {one: [] for one in chosen}
        for _ in range(_TURNS):
            for candidate in chosen:
                if candidate in plays.failed:
                    continue
                try:
                    result = result_of_module(
                        "partc.cli.machine.trial_rank", folders[candidate], candidate.degrees.ranks
                    )
                except RankError as error:
                    plays.failed[candidate] = str(error).partition("\n")[0]
                    continue
                console.detail(f"{candidate} on this host: {seconds(result['seconds'])}")
                turns[candidate].append(result["seconds"])
    plays.measured = {one: median(times) for one, times in turns.items() if one not in plays.failed}
