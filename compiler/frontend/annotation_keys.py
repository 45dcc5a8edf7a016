"""Metadata keys for facts that the standard's annotations cannot express; a tool that ignores them gets the same numbers. Values are JSON.

On a node:
    partc.group      [3, 1, 0]                                  the order of the node's ranks, where it is not ascending
    partc.follows    true                                       a constant or shape arithmetic: it runs on every rank that reads it
    partc.cuts       [{"ranks": [0, 1], "mesh": [2], "axes": {"k": [0]}}]    the sharding of factors, where no operand's spec gives it
    partc.terms      {"y": {"sum": [[0, 1], [2, 3]]}}           the output is partial: each of these sets of ranks reduces it
    partc.reduced    ["y"]                                      the plan wants the output reduced at this node, whoever reads it
On an input of the model:
    partc.arrives    [{"ranks": [0, 1], "mesh": [2], "cuts": [[0], []]}]     the layout of the shards that ranks get
On an output:
    partc.delivered  {"ranks": [1], "cut": false}               the ranks that get it; null: it stays where it is computed
    partc.unbiased, partc.frozen_statistics    true               a BatchNormalization's marks (`ir/graph.py`)
    partc.stops_gradient  true                                  an Identity through which no gradient flows (`ir/graph.py`)
    partc.own_backward    Rounded                               an Identity after a `torch.autograd.Function` of that name; a text
    partc.gradient        padding_row 0                         the form of its gradient in torch (`rewrite/gradient_forms.py`); a text
On a weight:
    partc.trainable  true                                       whether it is trainable in its module
On the model:
    partc.declared   {"placements": ..., "symbols": ...}        declarations of a `model.py` (`ir/declared.py`), by `partc export`
    partc.untrainable  [["'head'", "has a hook", "", ""]]       why its training would differ from its module's (`ir/graph.py`)
    partc.changed_by_forward  'center', 'steps'                 buffers and numbers that forward changes, the graph not; a text
    partc.mesh       [["dp", 2], ["tp", 4]]                     the names of the mesh's axes
    partc.kept       {"w": [{"ranks": [0, 1], "mesh": [2], "cuts": [[0], []]}]}    the layout of stored weights, where readers use another
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
    """A metadata value that does not have the form that its key requires."""


def encode(value: object) -> str:
    """Returns a value as JSON; equal values give equal texts."""
    return json.dumps(value, sort_keys=True)


def decode(metadata: Mapping[str, str], key: str) -> object:
    """Returns the value under a key, or None where the metadata lacks the key. Raises BrokenKey where the text is not JSON."""
    text = metadata.get(key)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise BrokenKey(f"the metadata '{key}' is not JSON: {text[:60]!r}") from None


def integers(value: object, key: str) -> tuple[int, ...]:
    """Returns a JSON list of integers as a tuple. Raises BrokenKey for any other value."""
    if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return tuple(value)
    raise BrokenKey(f"the metadata '{key}' wants a list of integers, but has {value!r}")


def records(value: object, key: str) -> list[dict[str, object]]:
    """Returns a JSON list of objects, empty for None. Raises BrokenKey for any other value."""
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    raise BrokenKey(f"the metadata '{key}' wants a list of objects, but has {value!r}")


def mapping(value: object, key: str) -> dict[str, object]:
    """Returns a JSON object, empty for None. Raises BrokenKey for any other value."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise BrokenKey(f"the metadata '{key}' wants an object, but has {value!r}")
