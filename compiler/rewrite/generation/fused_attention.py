"""Replaces attention over a cache by onnxruntime's fused op, where the mask is proven causal.

The fused op reads only valid entries, writes the new ones in place, and repeats no heads. Its kernel takes one token of each of several
sequences, or several tokens of one sequence: the two forms of a step.

    Attention(q, repeated(Slice(TensorScatter(cache_k, k, ..))), ..., mask)
      ->  GroupQueryAttention(q, k, v, cache_k, cache_v, ends, length)

Where the mask is a window, or nothing is proven of it, the model's own form stays. A mask that is proven to let a token attend
later entries is refused in either form: these belong to a later step, or to no sequence.

Classifies the masks of a decoder: a token attends all entries up to itself, later ones too, or nothing is proven.

A mask depends on positions, the number of tokens and constants alone, and a plan bounds them. So it is evaluated for every position that a
step can have (any for one token, a multiple of the chunk for a chunk) and compared with a causal mask. Of more than `MOST` positions an
evenly spaced selection with the last one is evaluated: a window shows there first.

Attention written as single ops has its mask between the product of queries and keys and the Softmax:

    Softmax(Where(mask, q kT, -inf))    Softmax(q kT * scale + mask)    Softmax(q kT): none

Where other ops stand there, or a mask depends on other values, nothing is proven, and nothing is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import take_out
from partc.compiler.ops.node import constant_ints
from partc.compiler.rewrite.evaluation import Computation, computation_of
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import COUNT, Positions
from partc.compiler.rewrite.generation.step_form import StepForm

FUSED, _DOMAIN = "GroupQueryAttention", "com.microsoft"
_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_SCALES = 12
"""The index of the op's first operand that is a scale."""


def head_counts(model: ir.Model) -> dict[ir.Node, int]:
    """Maps each Attention over four dims to the number of heads of its queries, where it is known."""
    attentions = [node for node in model.graph if node.op_type == "Attention" and node.domain in ("", "ai.onnx")]
    queries = [node.inputs[0] for node in attentions]
    if any(value is not None and value.shape is None for value in queries):
        infer_shapes(model, {})
    shapes = {
        node: value.shape
        for node, value in zip(attentions, queries, strict=True)
        if value is not None and value.shape is not None
    }
    return {node: shape[1] for node, shape in shapes.items() if len(shape) == 4 and isinstance(shape[1], int)}


@dataclass(frozen=True)
class CachedOperand:
    """The keys or values that an Attention reads: the node that appends them, the nodes from there to the Attention, and the new entries.

    `scale`: the scale of a cache in int8, else None.
    """

    append: ir.Node
    between: tuple[ir.Node, ...]
    new: ir.Value
    scale: ir.Value | None = None


def sights_of(
    graph: ir.Graph, attentions: Iterable[ir.Node], positions: Positions, form: StepForm, name: str
) -> dict[ir.Node, Sight]:
    """Maps each Attention over a cache to the sight of its mask, without those that have operands which the fused op lacks.

    Raises CompileError with every node by which a token sees later ones.
    """
    sights, known = dict[ir.Node, Sight](), dict[ir.Value | None, Sight]({None: Sight.LATER})
    for node in attentions:
        if any(node.inputs[4:]) or any(out.uses() for out in node.outputs[1:]) or not is_of_cache(node.inputs[1]):
            continue
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is not None and mask not in known:
            known[mask] = sight_of(graph, mask, positions, form)
        sights[node] = Sight.UNKNOWN if node.attributes.get_int("is_causal", 0) else known[mask]
    later = [node for node, sight in sights.items() if sight is Sight.LATER] + seeing_later(graph, positions, form)
    if later:
        more = f" and {len(later) - 1} more" if later[1:] else ""
        whose = "their" if later[1:] else "its"
        fact = f"in {later[0].op_type} '{later[0].name}'{more} a token sees later ones: {whose} mask is not causal"
        law = "a step has the tokens up to its own: what is behind them is of a later step, or of no sequence"
        raise CompileError(Problem(name, fact, law, "export the model with a causal mask"))
    return sights


def fuse_attention(
    build: NodeBuilder,
    heads: Mapping[ir.Node, int],
    sights: Mapping[ir.Node, Sight],
    replaced: dict[ir.Value, ir.Value],
    positions: Positions,
) -> list[ir.Node]:
    """Replaces every Attention whose mask is causal; in `replaced`, its caches then map to the fused op's outputs.

    Returns the nodes that would be replaced if their mask were proven causal.
    """
    left = list[ir.Node]()
    for node, sight in sights.items():
        keys, values = (operand_of_cache(node, k) for k in (1, 2))
        if keys is None or values is None or (keys.scale is None) != (values.scale is None):
            continue
        if not all(is_taken(one.append.inputs[0], one.scale) for one in (keys, values)):
            continue
        if sight is Sight.CAUSAL:
            _fuse(build, node, heads[node], (keys, values), replaced, positions)
        else:
            left.append(node)
    return left


def operand_of_cache(node: ir.Node, k: int) -> CachedOperand | None:
    """Returns the path from a cache to an operand, where the cache has no other reader; None where it has another form.

    The path is a Slice, for a cache in int8 also Cast and Mul, and where heads are repeated also Unsqueeze, Expand, Reshape.
    """
    between, value = list[ir.Node](), node.inputs[k]
    while value is not None and len(value.uses()) == 1 and (producer := value.producer()) is not None:
        if producer.op_type == "TensorScatter":
            return _read_of(producer, between)
        between.append(producer)
        value = producer.inputs[0]
    return None


def _read_of(append: ir.Node, between: list[ir.Node]) -> CachedOperand | None:
    kinds, new = [one.op_type for one in between], append.inputs[1]
    if kinds[:3] == ["Reshape", "Expand", "Unsqueeze"]:
        if constant_ints(between[2], 1) != (2,):
            return None
        kinds = kinds[3:]
    scale, is_half = None, kinds[:1] == ["Cast"]
    if kinds[is_half:] == ["Mul", "Cast", "Slice"]:
        scale = between[-3].inputs[1]
        for _ in range(4 + is_half):  # Cast, Clip, Round, Div, and for 16 bits the Cast before them
            made_by = None if new is None else new.producer()
            new = None if made_by is None else made_by.inputs[0]
    elif kinds != ["Slice"]:
        return None
    right = new is not None and new.dtype in (*_TYPES, None) and append.attributes.get_int("axis", -2) % 4 == 2
    return CachedOperand(append, tuple(between), new, scale) if right and new is not None else None


def is_taken(cache: ir.Value | None, scale: ir.Value | None) -> bool:
    """Whether the fused op's kernel takes a cache: its type, and a head size that is a multiple of 8."""
    types = _TYPES if scale is None else (ir.DataType.INT8,)
    if cache is None or cache.shape is None or len(cache.shape) != 4 or cache.dtype not in types:
        return False
    size = cache.shape[3]
    return isinstance(size, int) and size % 8 == 0


def _fuse(
    build: NodeBuilder,
    node: ir.Node,
    heads: int,
    reads: tuple[CachedOperand, CachedOperand],
    replaced: dict[ir.Value, ir.Value],
    positions: Positions,
) -> None:
    caches = [read.append.inputs[0] for read in reads]
    first = caches[0]
    assert first is not None
    assert first.shape is not None
    kv = int(str(first.shape[1]))
    operands = (node.inputs[0], heads), *((read.new, kv) for read in reads)
    rows = [joined_rows(build, node, value, count) for value, count in operands if value is not None]
    attributes = {"num_heads": heads, "kv_num_heads": kv}
    numbers = {name: node.attributes[name].as_float() for name in ("scale", "softcap") if name in node.attributes}
    numbers = {name: value for name, value in numbers.items() if value}
    inputs: list[ir.Value | None] = [*rows, *caches, *positions.ends]
    texts = dict[str, str]()
    if scales := [_flat(build, read.scale) for read in reads if read.scale is not None]:
        inputs += [*[None] * (_SCALES - len(inputs)), *scales]
        texts = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        attributes["kv_cache_bit_width"] = 8
    outputs = build.node("attention", FUSED, inputs, 3, _DOMAIN, **attributes, **numbers, **texts)
    split = build.op("heads", "Reshape", [outputs[0], build.constant(f"heads_{heads}", [0, 0, heads, -1])])
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if all(_swaps_heads(reader) for reader in readers) and not node.outputs[0].is_graph_output():
        build.put(before=node)
        for reader in readers:
            ir.convenience.replace_all_uses_with(reader.outputs[0], split)
            take_out(build.graph, reader)
    else:
        whole = build.op("turned_back", "Transpose", [split], perm=[0, 2, 1, 3])
        build.put(before=node)
        ir.convenience.replace_all_uses_with(node.outputs[0], whole)
    take_out(build.graph, node)
    for cache, read, present in zip(caches, reads, outputs[1:], strict=True):
        assert cache is not None
        following = replaced[cache]
        name, following.name = following.name, None
        present.name, present.type = name, following.type
        replaced[cache] = present
        for one in (*read.between, read.append):
            take_out(build.graph, one)


def _flat(build: NodeBuilder, scale: ir.Value) -> ir.Value:
    """Returns the scales of a cache as one vector, the form that the op requires."""
    assert scale.const_value is not None
    return build.constant(f"{scale.name}.flat", scale.const_value.numpy().reshape(-1))


def joined_rows(build: NodeBuilder, node: ir.Node, value: ir.Value, heads: int) -> ir.Value:
    """Returns an Attention's operand [rows, heads, tokens, size] as [rows, tokens, heads * size], in nodes before the Attention.

    Exporters make the former from the latter by a Transpose, after which the heads may be rotated: then the rotation moves before it.
    """
    flat, producer = build.constant("flat", [0, 0, -1]), value.producer()
    if producer is not None and _swaps_heads(producer):
        flattened = build.op("flat", "Reshape", [producer.inputs[0], flat])
        build.put(before=node)
        return flattened
    turned = None if producer is None or producer.inputs[0] is None else producer.inputs[0].producer()
    rotates = producer is not None and producer.op_type == "RotaryEmbedding" and producer.domain in ("", "ai.onnx")
    if producer is None or turned is None or not rotates or not _swaps_heads(turned) or len(value.uses()) != 1:
        flattened = build.op("flat", "Reshape", [build.op("turned", "Transpose", [value], perm=[0, 2, 1, 3]), flat])
        build.put(before=node)
        return flattened
    joined = build.op("flat", "Reshape", [turned.inputs[0], flat])
    build.put(before=producer)
    producer.replace_input_with(0, joined)
    producer.attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
    return value


def _swaps_heads(node: ir.Node) -> bool:
    """Whether a node is a Transpose that exchanges heads and tokens, in either direction."""
    return node.op_type == "Transpose" and [*node.attributes.get_ints("perm", [])] == [0, 2, 1, 3]


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
