"""Renames the inputs' dynamic dims before anything reads them: each name becomes an identifier, and different names stay different.

ONNX allows any text as the name of a dim. All later passes, the manifest and the plan write dims in expressions, so a name must be valid
in an expression: `batch size` becomes `batch_size`, `Max(n` becomes `Max_n`, `past + 1` becomes `past_1`. Texts that mark an unknown size
are not names: `?`, `-1`, `None`, `unk`, an empty text, or the size -1. Exporters write them for any dim of unknown size, so two such dims
are not equal, as in onnxruntime.
"""

from __future__ import annotations

import re

import onnx_ir as ir
from partc.compiler.dims.symbol import identifier
from partc.compiler.errors import Problem
from partc.compiler.frontend.names import free_name

_MARKS = frozenset({"any", "dyn", "dynamic", "nan", "none", "null", "undefined", "unk", "unknown"})
"""Words that exporters write for any unknown size."""


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
    """Whether a dim's text marks an unknown size and names nothing: it has no letter, or is one of the words for it."""
    words = re.findall(r"\w+", text)
    return not any(char.isalpha() for char in text) or (len(words) == 1 and words[0].strip("_").lower() in _MARKS)
