"""Pass: the caches of a decoder are listed among what ranks keep, each in the layout in which it is read, with what takes its place."""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.programs import State
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.lower.local_view import Localized


def keep_caches(program: Localized) -> Localized:
    """The program with its caches among what ranks keep. CompileError where one would have to travel to be kept."""
    if not program.caches:
        return program
    local, problems = program.local, list[Problem]()
    versions, at = local.versions, local.comm.values.at
    for cache, following in program.caches.items():
        for home in versions.defs.get(cache, ()):
            made = ShardedValue(following, home.group, home.layout)
            if made not in at:
                fact = f"the cache '{cache.name}' is read in one layout and made in another"
                rules = program.plan.generate
                where = rules.where() if rules is not None else program.name
                problems.append(
                    Problem(where, fact, "a cache stays where it is", "shard what writes it as what reads it")
                )
                continue
            local.comm.job.kept.add(home.group, at[home], State(at[home], home, at[made], name_of(cache), "cache"))
    if problems:
        raise CompileError(problems)
    return replace(program, local=local)
