"""Classifies the masks of a decoder: a token attends all entries up to itself, later ones too, or nothing is proven.

A mask depends on positions, the number of tokens and constants alone, and a plan bounds them. So it is evaluated for every position that a
step can have (any for one token, a multiple of the chunk for a chunk) and compared with a causal mask. Of more than `MOST` positions an
evenly spaced selection with the last one is evaluated: a window shows there first.

Attention written as single ops has its mask between the product of queries and keys and the Softmax:

    Softmax(Where(mask, q kT, -inf))    Softmax(q kT * scale + mask)    Softmax(q kT): none

Where other ops stand there, or a mask depends on other values, nothing is proven, and nothing is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.rewrite.evaluation import Computation, computation_of
from partc.compiler.rewrite.generation.positions import COUNT, Positions
from partc.compiler.rewrite.generation.step_form import StepForm

MOST = 8192
_AWAY, _NEAR = -1e4, -100.0
"""The number added to the score of an excluded entry is at most the first, and to that of an attended entry more than the second."""
_SCALING, _MOVING = ("Add", "Div", "Mul", "Where"), ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_OF_CACHE = (*_MOVING, "Mul", "Slice", "Transpose")


class Sight(enum.Enum):
    """The entries that a mask lets each token attend: exactly those up to itself; also later ones; or anything else, or unknown ones."""

    CAUSAL = enum.auto()
    LATER = enum.auto()
    UNKNOWN = enum.auto()


def sight_of(graph: ir.Graph, mask: ir.Value, positions: Positions, form: StepForm, hides: bool = False) -> Sight:
    """Evaluates a mask at every position that a step can have; `hides`: the mask is true where an entry is excluded."""
    computation, causal = _computation(graph, mask, positions), True
    if computation is None:
        return Sight.UNKNOWN
    # where a prompt is read token by token, two tokens are tried as well, if the model takes them
    widths = (form.tokens, 2) if form.rules.chunk == 1 and not positions.takes_one else (form.tokens,)
    for width in widths:
        every = range(0, form.rules.length, width)
        for batch in _batches(every[:: -(len(every) // MOST + 1)], form.rows):
            values = computation.run(
                {
                    str(positions.position.name): np.asarray(batch, np.int64),
                    COUNT: np.full(len(batch), width, np.int64),
                    str(positions.ids.name): np.zeros((len(batch), width), np.int64),
                }
            )
            if values.ndim == 5 and values.shape[2] == 1:  # queries grouped by their head of keys
                values = values[:, :, 0]
            values = values.reshape(
                *[1] * (4 - values.ndim), *values.shape
            )  # the same for every head, and for every sequence
            values = ~values if hides and values.dtype == np.bool_ else values
            seen = values if values.dtype == np.bool_ else values > _NEAR
            entries, tokens = np.arange(max(batch) + width), np.arange(width)
            wanted = entries[None, None, None] <= np.asarray(batch)[:, None, None, None] + tokens[None, None, :, None]
            fits = seen.ndim == 4 and seen.shape[-1] == len(entries) and seen.shape[2] in (1, width)
            if not fits or seen.shape[0] not in (1, form.rows):
                return Sight.UNKNOWN
            if (seen & ~wanted).any():
                return Sight.LATER
            exact = values.dtype == np.bool_ or ((values == 0) | (values <= _AWAY)).all()
            causal = causal and bool(exact) and bool((seen == wanted).all())
    return Sight.CAUSAL if causal else Sight.UNKNOWN


def _computation(graph: ir.Graph, value: ir.Value, positions: Positions) -> Computation | None:
    """Returns how a value follows from positions, the number of tokens and constants; None if it depends on anything else."""
    return computation_of(graph, value, (positions.position, positions.count), (positions.ids,))


def _batches(every: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields the positions in batches of `size`; the last batch is filled up with its last position."""
    for begin in range(0, len(every), size):
        some = [*every[begin : begin + size]]
        yield some + some[-1:] * (size - len(some))


def is_of_cache(value: ir.Value | None) -> bool:
    """Whether a value is the content of a decoder's cache, perhaps scaled or with its dims moved."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type == "TensorScatter":
            return True
        if producer.op_type not in _OF_CACHE:
            return False
        value = producer.inputs[0]
    return False


def seeing_later(graph: ir.Graph, positions: Positions, form: StepForm) -> list[ir.Node]:
    """Returns the Softmaxes over scores of a cache's keys in which a token is proven to attend later entries."""
    known: dict[tuple[ir.Value, bool], Sight] = {}
    softmaxes = []
    for node in graph:
        masks = _masks(graph, node, positions) if node.op_type == "Softmax" else None
        if masks is None:
            continue
        for key in masks:
            if key not in known:
                known[key] = sight_of(graph, key[0], positions, form, key[1])
        if all(known[key] is Sight.LATER for key in masks):  # also where there is no mask
            softmaxes.append(node)
    return softmaxes


def _masks(graph: ir.Graph, softmax: ir.Node, positions: Positions) -> list[tuple[ir.Value, bool]] | None:
    """Returns the masks on the scores of a cache's keys, each with whether it hides; None for other scores, or an unknown form."""
    masks, value = list[tuple[ir.Value, bool]](), softmax.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        operands = [one for one in producer.inputs if one is not None]
        if producer.op_type == "MatMul":
            return masks if any(map(is_of_cache, operands)) else None
        if producer.op_type in _MOVING:
            value = operands[0]
            continue
        made = [one for one in operands if _computation(graph, one, positions) is not None]
        rest = [one for one in operands if one not in made]
        if producer.op_type not in _SCALING or len(rest) != 1:
            return None
        value = rest[0]
        given = [one for one in made if computation_of(graph, one, ()) is None]  # without constants
        if producer.op_type == "Where" and operands[0] in given:
            masks.append((operands[0], value is operands[2]))
        elif producer.op_type == "Add":
            masks += [(one, False) for one in given]
        elif given or producer.op_type == "Where":
            return None
    return None
