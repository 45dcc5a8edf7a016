"""Metadata keys for facts that the standard's annotations cannot express; a tool that ignores them gets the same numbers. Values are JSON.

On a node:
    partc.group      [3, 1, 0]                                  its ranks in their order, where that is not the rising one
    partc.follows    true                                       a constant or shape arithmetic: it runs wherever it is read
    partc.cuts       [{"ranks": [0, 1], "mesh": [2], "axes": {"k": [0]}}]    cuts by factor, where the operands' do not tell them
    partc.terms      {"y": {"sum": [[0, 1], [2, 3]]}}           the output is made as terms, which these sets of ranks reduce
    partc.reduced    ["y"]                                      the plan wants it reduced where it is made, whoever reads it
On an input of the model:
    partc.arrives    [{"ranks": [0, 1], "mesh": [2], "cuts": [[0], []]}]     the ranks are fed shards
On an output:
    partc.delivered  {"ranks": [1], "cut": false}               where it goes; ranks null: it stays where it is made
    partc.unbiased, partc.frozen_statistics    true               a BatchNormalization's marks (`ir/graph.py`)
    partc.stops_gradient  true                                  an Identity through which no gradient flows (`ir/graph.py`)
    partc.own_backward    Rounded                               an Identity behind a `torch.autograd.Function` of that name; a text
    partc.gradient        padding_row 0                         which gradient torch gives it (`rewrite/gradient_forms.py`); a text
On a weight:
    partc.trainable  true                                       whether its module says that it is trainable
On the model:
    partc.declared   {"placements": ..., "symbols": ...}        what a `model.py` declares (`ir/declared.py`), of `partc export`
    partc.untrainable  [["'head'", "has a hook", "", ""]]       why its training would not be that of its module (`ir/graph.py`)
    partc.changed_by_forward  'center', 'steps'                 what its module's forward changes, and the graph does not; a text
    partc.mesh       [["dp", 2], ["tp", 4]]                     the names of the mesh's axes
    partc.kept       {"w": [{"ranks": [0, 1], "mesh": [2], "cuts": [[0], []]}]}    weights that are kept otherwise than they are read
    partc.symbols    {"batch": {"divisor": 8, "remainder": 0, "min": 8, "max": 512}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping

PREFIX = "partc."
GROUP, FOLLOWS, CUTS, TERMS, REDUCED = "partc.group", "partc.follows", "partc.cuts", "partc.terms", "partc.reduced"
ARRIVES, DELIVERED, KEPT = "partc.arrives", "partc.delivered", "partc.kept"
MESH, SYMBOLS = "partc.mesh", "partc.symbols"
DECLARED, TRAINABLE = "partc.declared", "partc.trainable"


class BrokenKey(ValueError):
    """A metadata value that is not what its key promises."""


def encode(value: object) -> str:
    """The JSON of a value, the same for equal ones."""
    return json.dumps(value, sort_keys=True)


def decode(metadata: Mapping[str, str], key: str) -> object:
    """The value under a key, None where there is none. Raises BrokenKey where it is not JSON."""
    text = metadata.get(key)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise BrokenKey(f"the metadata '{key}' is not JSON: {text[:60]!r}") from None


def integers(value: object, key: str) -> tuple[int, ...]:
    """A JSON list of integers. Raises BrokenKey for anything else."""
    if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return tuple(value)
    raise BrokenKey(f"the metadata '{key}' wants a list of integers, but has {value!r}")


def records(value: object, key: str) -> list[dict[str, object]]:
    """A JSON list of objects, empty for None. Raises BrokenKey for anything else."""
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    raise BrokenKey(f"the metadata '{key}' wants a list of objects, but has {value!r}")


def mapping(value: object, key: str) -> dict[str, object]:
    """A JSON object, empty for None. Raises BrokenKey for anything else."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise BrokenKey(f"the metadata '{key}' wants an object, but has {value!r}")
