"""Pass: the model in the forms that the passes speak of: the opset of the op table, combined ops decomposed, local maps with their sizes.

A model whose operators are not cut keeps its opset: every conversion is one more thing that can change numbers.
"""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.annotations.read import read
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.program import Loaded
from partc.compiler.rewrite.local_maps import with_sizes
from partc.compiler.rewrite.mixtures import write_out_mixture
from partc.compiler.rewrite.opset import OLDEST, TARGET, converted, cuts


def normalize(program: Loaded) -> Loaded:
    """The program with its model converted, and with the paths of its nodes. CompileError where the converter cannot."""
    plan, declared, trains = program.plan, program.declared, program.plan.train is not None
    cut = cuts(plan, declared)
    model = with_sizes(program.model, plan)
    if cut or trains:
        model = converted(model, program.name, TARGET if trains else OLDEST, trains)
    elif plan.generate is not None:
        for node in list(model.graph):
            write_out_mixture(node)
    if declared.annotations and cut and not trains:  # a converter makes nodes anew
        again = read(model, program.name, declared.annotations.asked)
        declared = replace(declared, annotations=again)
    paths = program.paths if list(model.graph) == list(program.paths) else node_paths(model)
    return replace(program, model=model, declared=declared, paths=paths)
