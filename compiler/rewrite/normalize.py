"""Pass: brings the model to the forms that later passes expect: the op table's opset, combined ops decomposed, local maps with sizes.

A model without sharded operators keeps its opset, since a conversion could change its numbers.
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
    """Returns the program with its model converted, and with the paths of its nodes; raises CompileError if the converter fails."""
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
