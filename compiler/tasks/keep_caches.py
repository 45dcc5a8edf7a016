"""The caches of a decoder among what ranks keep: each in the layout in which it is read, with what takes its place."""

from __future__ import annotations

from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import State
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.lower.comm import CommLowering
from partc.compiler.sharding.values.value_versions import ValueVersions


def keep_caches(program: Targeted, versions: ValueVersions, comm: CommLowering) -> None:
    """Lists the caches in the job. CompileError where one would have to travel to be kept."""
    at, problems = comm.values.at, list[Problem]()
    for cache, following in program.caches.items():
        for home in versions.defs.get(cache, ()):
            made = ShardedValue(following, home.group, home.layout)
            if made in at:
                comm.job.kept.add(home.group, at[home], State(at[home], home, at[made], name_of(cache), "cache"))
                continue
            fact = f"the cache '{cache.name}' is read in one layout and made in another"
            where = program.name if program.plan.generate is None else program.plan.generate.where()
            problems.append(Problem(where, fact, "a cache stays where it is", "shard what writes it as what reads it"))
    if problems:
        raise CompileError(problems)
