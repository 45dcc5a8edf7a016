"""Names of the inputs' dynamic dims: every one becomes an identifier, distinct from the others, before anything reads it.

ONNX lets a dim be named by any text. All later passes, the manifest and the plan write dims in expressions, so a name must be one that an
expression can hold: `batch size` becomes `batch_size`, `Max(n` becomes `Max_n`, `past + 1` becomes `past_1`. A mark of an unknown size
is not a name: `?`, `-1`, `None`, `unk`, an empty text, or the size -1. Exporters write it wherever they know nothing, so each
such dim is one of its own, as onnxruntime takes it.
"""

from __future__ import annotations

import re

import onnx_ir as ir
from partc.compiler.dims.symbol import identifier
from partc.compiler.errors import Problem
from partc.compiler.frontend.names import free_name

_MARKS = frozenset({"any", "dyn", "dynamic", "nan", "none", "null", "undefined", "unk", "unknown"})
"""Words that exporters write for every size that they do not know."""


def name_input_dims(graph: ir.Graph, where: str) -> list[Problem]:
    """Renames the dims of the graph's inputs; equal names stay equal. Returns a problem for each negative size."""
    problems: list[Problem] = []
    names: dict[str, str] = {}
    taken: set[str] = set()
    for value in graph.inputs:
        if value.shape is None:
            continue
        dims: list[int | str | None] = []
        for axis, dim in enumerate(value.shape.dims):
            if isinstance(dim, int):
                if dim < -1:
                    fact = f"dim {axis} of input '{value.name}' is {dim}"
                    problems.append(Problem(where, fact, "a size is at least 0", "name a dynamic dim"))
                dims.append(None if dim < 0 else dim)
            elif dim.value is None or is_mark(text := str(dim.value)):
                dims.append(None)
            else:
                if text not in names:
                    names[text] = free_name(identifier(text), taken)
                dims.append(names[text])
        value.shape = ir.Shape(dims)
    return problems


def is_mark(text: str) -> bool:
    """Whether a dim's text says that its size is unknown, and names nothing: it has no letter, or is a word for it."""
    words = re.findall(r"\w+", text)
    return not any(char.isalpha() for char in text) or (len(words) == 1 and words[0].strip("_").lower() in _MARKS)
