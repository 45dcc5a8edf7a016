"""Proves that nodes of one name are one node, on all ranks and in all programs of an artifact.

A node is named after the model's op that it computes, or after the feature that adds it (a gradient, a loss, a step that generates tokens).
Ranks and programs compute it as one op on shards of different sizes. So nodes of one name have one op, the same attributes, and operands of
one origin:

    weight, state    the tensor that it is
    constant         its numbers
    value            the node that makes it, and the output of that node: reshards, messages and collectives do not change the origin,
                     nor does a Cast of a value in 16 bits for a kernel in 32
    input            its name

Operands that depend on sizes may differ if the sizes of the node's operands and results do: constants of integers, such as the target of a
Reshape, and attributes that count heads, groups or elements. The nodes of a loss and of metrics are compared among programs of one number
of microbatches. A program that trains makes some values differently (a mask, a norm); yet an operand that is a node's in one program is
that node's in each program that has both it and the other one.

    LayerNormalization(%h, %w, %b) {epsilon: 1e-05} in rank_0000.onnx, {epsilon: 1e-02} in rank_0001.onnx     one of them is wrong

It also proves that nodes that are one function have one gradient: in equal layers, on any ranks and stages.

The nodes of a file that have one source are a function: their ops, attributes, the constants and the types of their operands and results,
and their shardings. Its gradient is the nodes of the backward pass that have that source. Two gradients are compared if they read the same
places of equal functions and make the same types; the requested gradients of a function, and values shared with another node, may differ,
and then the gradients are not compared.

    layers.0.gelu: Gelu(x)    g * (0.5 * (1 + Erf(x * 0.7071)) + ...)
    layers.1.gelu: Gelu(y)    h * (0.6 * (1 + Erf(y * 0.7071)) + ...)     another constant: one of them is wrong
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper
from partc.runtime.artifact.comm.collectives import BODIES, LOOKUPS
from partc.runtime.artifact.format import (
    CUT,
    DOMAIN,
    DTYPE,
    HOP,
    PATH,
    PHASE,
    PIECE,
    RANK_CONSTANT,
    RECV,
    RULE,
    SEND,
    SHAPE_ARITHMETIC,
    TAG,
    TARGET,
    TASK,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of, source_path
from partc.runtime.artifact.training.training_record import TrainingRecord
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.subject import CONSTANT, NamedNode, Origin, Subject
from partc.runtime.errors import Violation

_BACKWARD = "backward"


@dataclass
class Gradient:
    """The gradient of a function in the first file that has it."""

    source: str
    file: str
    nodes: Counter[Hashable]


def check_gradients(
    nodes: Iterable[NamedNode], known: dict[Hashable, Gradient], integers: Mapping[str, bytes]
) -> Iterator[Violation]:
    """Yields gradients of a file's nodes that differ from those of equal functions; `known` are those of the files checked before.

    `integers`: maps the file's own integer tensors, such as the bounds of a Slice, which the model may have as weights, to their numbers.
    """
    functions = defaultdict[str, tuple[list[NamedNode], list[NamedNode]]](lambda: ([], []))
    for one in nodes:
        phase = metadata_of(one.node, PHASE)
        if source_path(one.node) and phase in ("", _BACKWARD):
            functions[source_path(one.node)][phase == _BACKWARD].append(one)
    for source, (forward, backward) in functions.items():
        if forward and backward and not _is_number(forward[-1]):
            yield from _compare(source, forward, backward, known, integers)


def _compare(
    source: str,
    forward: Sequence[NamedNode],
    backward: Sequence[NamedNode],
    known: dict[Hashable, Gradient],
    integers: Mapping[str, bytes],
) -> Iterator[Violation]:
    types = forward[0].types
    places: dict[str, int] = {}
    for one in forward:
        for name in (*one.node.input, *one.node.output):
            places.setdefault(name, len(places))
    named = {name for one in (*forward, *backward) for name in (*one.node.input, *one.node.output)}
    sized = all(each[1] is not None for each in map(types.get, named) if isinstance(each, tuple))
    function = tuple(
        (
            _content(one, integers, sized),
            *((places[name], str(types.get(name))) for name in (*one.node.input, *one.node.output)),
            tuple(part.partition(" by ")[0] for part in metadata_of(one.node, CUT).split(", ")),
        )
        for one in forward
    )
    forms = [
        ((tuple((places.get(name, -1), str(types.get(name))) for name in (*one.node.input, "", *one.node.output))), one)
        for one in backward
    ]
    contents: dict[Hashable, NamedNode] = {(form, _content(one, integers, sized)): one for form, one in forms}
    nodes = Counter[Hashable]((form, _content(one, integers, sized)) for form, one in forms)
    own = Gradient(source, forward[0].file, nodes)
    first = known.setdefault((function, frozenset(Counter(form for form, _ in forms).items())), own)
    for other in nodes - first.nodes:
        there = f"'{first.source}'" + (f" in {first.file}" if first.file != own.file else "")
        fact = f"it is another node than in the gradient of {there}, and both are gradients of one function"
        yield Violation(own.file, fact, node_title(contents[other].node), source, "compile the model again")
        return


def _is_number(one: NamedNode) -> bool:
    """Whether a node's result is a single number, such as a loss, whose gradient begins with its weight."""
    types = (one.types.get(name) for name in one.node.output)
    return all(isinstance(each, tuple) and each[1] == [] for each in types)


def _content(named: NamedNode, integers: Mapping[str, bytes], sized: bool) -> Hashable:
    """Returns a key of the function that a node computes of its operands.

    Where sizes are not known (`sized`), integers may follow from them, and are not compared.
    """
    operands = zip(named.node.input, named.operands, strict=False)
    constants = tuple(origin if origin[0] is CONSTANT else integers.get(name) for name, origin in operands)
    if not sized:
        constants = tuple(
            None if isinstance(each, bytes) or (each and each[1] in _INTEGERS) else each for each in constants
        )
    return named.node.domain, named.node.op_type, frozenset(named.attributes.items()), constants


_AGAIN = "compile the model again"
_UPDATE = "update"
_COUNTS = frozenset({"group", "num_heads", "kv_num_heads", "q_num_heads", "split", "num_outputs"})
"""Attributes that depend on the sizes of shards."""
_REWRITTEN = frozenset({"keepdims"})
"""Attributes of ops that a training splits in parts, such as a maximum and the number of elements that equal it."""
_MODES = frozenset({"training_mode"})
"""Attributes by which a training runs an op differently."""
_MASKS = frozenset({"Cast", "Dropout", "Identity", "Mul", "Where"})
"""Ops that may replace one another in a training."""
_RESHARDS = frozenset({"Concat", "Pad", "Slice", "Split", "Where"})
"""Ops by which a reshard on one rank moves elements; such a node is not the model's, so no rule of the plan applies to it."""
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
"""The only ops of shape arithmetic that are the same on all ranks, such as those of a mask: their operands may be computed differently."""
_CUT, _SPAN = re.compile(r"^(.*)\[([\d:, ]+)\]$"), re.compile(r"(\d+):(\d+)")
_READ = re.compile(r"\.read'*$")
"""The end of the name of a value in 16 bits that is widened for kernels in 32."""
_TASK, _REPEATED = re.compile(r"\.[FBW]\d+$"), re.compile(r"\.recomputed$")
_VALUE, _INPUT = "value", "input"
_MOST_HOPS = 8
"""The most messages through which a value is followed back to the node that makes it."""
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def check_alike(subject: Subject) -> Iterator[Violation]:
    """Yields nodes of one name that differ, within a program and from those of the programs checked before.

    The nodes of a task have the names of its first call.
    """
    manifest = subject.shared
    files = {file: subject.once[ranks[0]] for file, ranks in manifest.by_file(subject.once).items()}
    tensors = {record.value: (record.tensor,) for record in manifest.state}
    origins = {file: _origins(model, tensors) for file, model in files.items()}
    sent = {name: origin for known in origins.values() for name, origin in known.items() if origin != (_VALUE, name)}
    tasks = (task for row in subject.rows.values() for task in row.tasks if task is not None)
    microbatches = len({task.microbatch for task in tasks})
    reported = set[tuple[str, str]]()
    gradients = dict[Hashable, Gradient]()
    by_file = subject.manifest.by_file(subject.models)
    for file, ranks in by_file.items():
        yield from _other_weights(subject, file, ranks[0])
    yield from _missing_shards({file: subject.models[ranks[0]] for file, ranks in by_file.items()})
    for origin in (origin for known in origins.values() for origin in known.values()):
        subject.known.programs.setdefault(origin, set()).add(manifest.name)
    for file, model in files.items():
        seen = set[tuple[str, str]]()
        nodes = list[NamedNode]()
        types = declared_types(model)
        for node in model.graph.node:
            key = name, _ = _name_and_path(node)
            if _is_of_one_rank(node) or not name or key in seen or name.endswith("'") or " -> " in name:
                continue
            seen.add(key)
            sizes = metadata_of(node, RULE) == SHAPE_ARITHMETIC
            operands = tuple(_resolved(origins[file], sent, name) for name in node.input) if not sizes else ()
            own = NamedNode(file, manifest.name, node, operands, types)
            nodes.append(own)
            batches = microbatches if _is_of_loss(node, subject.training) else 0
            first = subject.known.nodes.setdefault((*key, batches), own)
            if first is not own and key not in reported and (fact := _difference(first, own, subject)):
                reported.add(key)
                yield Violation(file, fact, node_title(node), path_of(node), _AGAIN)
        if not reported:
            own_tensors = [
                one for one in model.graph.initializer if one.data_type in _INTEGERS and not one.external_data
            ]
            integers = {one.name: numpy_helper.to_array(one).tobytes() for one in own_tensors}
            yield from check_gradients(nodes, gradients, integers)


def _other_weights(subject: Subject, file: str, rank: int) -> Iterator[Violation]:
    """Yields weights that are another shard than in another program of the rank, or whose numbers differ in another file."""
    for tensor in subject.models[rank].graph.initializer:
        text = metadata_of(tensor, PIECE)
        shard = subject.known.shards.setdefault((rank, tensor.name), text)
        numbers = subject.known.numbers.setdefault(text, tensor.raw_data) if text and tensor.raw_data else b""
        if shard != text:
            yield Violation(
                file, f"it is '{text}', and '{shard}' in another program", f"weight '{tensor.name}'", help=_AGAIN
            )
        elif text and tensor.raw_data and numbers != tensor.raw_data:
            yield Violation(
                file, f"'{text}' has other numbers than in another file", f"weight '{tensor.name}'", help=_AGAIN
            )


def _missing_shards(files: Mapping[str, ModelProto]) -> Iterator[Violation]:
    """Yields sharded weights of which some part is on no rank."""
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for model in files.values():
        for tensor in model.graph.initializer:
            if cut := _CUT.search(metadata_of(tensor, PIECE)):
                box = tuple((int(begin), int(end)) for begin, end in _SPAN.findall(cut[2]))
                boxes.setdefault(cut[1], set()).add(box)
    for name, parts in boxes.items():
        if len(parts) == 1 or any(map(_has_gap, zip(*parts, strict=False))):
            texts = (", ".join(f"{begin}:{end}" for begin, end in part) for part in sorted(parts))
            fact = f"all ranks have [{'], ['.join(texts)}] of it, and another part is on no rank"
            yield Violation(next(iter(files)), fact, f"weight '{name}'", help=_AGAIN)


def _has_gap(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether spans leave out an element between 0 and the end of the last span."""
    reached = 0
    for begin, end in sorted(spans):
        if begin > reached:
            return True
        reached = max(reached, end)
    return False


def _is_of_one_rank(node: NodeProto) -> bool:
    """Whether a node may differ on each rank: communication, hops of a ring, sums over a rank's gradients, and sizes."""
    summed = metadata_of(node, PHASE) == _UPDATE and not node.domain
    return (
        node.domain == DOMAIN
        or summed
        or metadata_of(node, HOP) != ""
        or node.op_type in ("Shape", "Size")
        or (metadata_of(node, RULE) == SHAPE_ARITHMETIC and node.op_type not in _COMPARISONS)
    )


def _name_and_path(node: NodeProto) -> tuple[str, str]:
    """Returns the name of a node, without the parts for its microbatch, its only reading task, its target, or its recomputation.

    Also its source, without its target.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    target = f".{metadata.get(TARGET, '')}"
    name, path = node.name, metadata.get(PATH, "").removesuffix(target)
    if TASK in metadata:
        name = name.rpartition(".")[0]
    name = name.removesuffix(target)
    for suffix in (_TASK, _REPEATED):
        match = suffix.search(name)
        if match and not path.endswith(match[0]):
            name = name[: match.start()]
    return name, path


def _origins(model: ModelProto, tensors: Mapping[str, Origin]) -> dict[str, Origin]:
    """Maps each value of a file to its origin, as far as the file tells it; a received message is a value, too."""
    known: dict[str, Origin] = {port.name: (_INPUT, port.name) for port in model.graph.input}
    for tensor in model.graph.initializer:
        stored = tensor.external_data or any(entry.key == PIECE for entry in tensor.metadata_props)
        # `w@[2, 1]` is w in a layout
        known[tensor.name] = (tensor.name.partition("@[")[0],) if stored else _numbers(tensor)
    known |= tensors
    for node in model.graph.node:
        read = [known.get(name, (_VALUE, name)) for name in node.input]
        results = node.output if node.op_type != SEND else [_message(node)]
        rule = _RULES.get((node.domain, node.op_type), _passed if node.domain == DOMAIN else _computed)
        known |= zip(results, rule(node, read), strict=False)
    return known


def _message(node: NodeProto) -> str:
    return f"{_VALUE} {integer_of(node, TAG, -1)}"


def _passed(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    """Returns each operand's own origin; zeros of a rank in a sum have none."""
    pairs = zip(read, node.output, strict=False)
    return [origin if origin[0] is not CONSTANT else (_VALUE, result) for origin, result in pairs]


def _computed(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    if metadata_of(node, HOP):  # ranks have other numbers of hops
        return [(_VALUE, _name_and_path(node)[1])] * len(node.output)
    name, path = _name_and_path(node)
    return [(name, at, path) for at in range(len(node.output))]


def _unknown(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    return [(_VALUE, result) for result in node.output]


def _moved(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    """Returns, for a reshard, the origin of the only operand that is not a constant; a Concat with constants makes a shape."""
    parts = {name: origin for name, origin in zip(node.input, read, strict=True) if origin[0] is not CONSTANT}
    shape = node.op_type == "Concat" and len(parts) != len(node.input)
    if any(entry.key == RULE for entry in node.metadata_props) or len({*parts.values()}) != 1 or shape:
        return _computed(node, read)
    origin = next(iter(parts.values()))
    microbatches = node.op_type == "Split" and origin[0] is _INPUT
    return [(*origin, at) if microbatches else origin for at in range(len(node.output))]


def _widened(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    """Returns the operand's origin for a Cast to float32 that several nodes read, which has the path of a rank's first reader."""
    name, path = _name_and_path(node)
    return read if _READ.search(name) and name != path else _computed(node, read)


def _literal(node: NodeProto, read: Sequence[Origin]) -> Sequence[Origin]:
    texts = (one.t if one.HasField("t") else one for one in node.attribute)
    return [next(map(_numbers, texts), (CONSTANT, 0))]


_RULES: Mapping[tuple[str, str], Callable[[NodeProto, Sequence[Origin]], Sequence[Origin]]] = {
    (DOMAIN, RANK_CONSTANT): lambda node, read: [(CONSTANT, integer_of(node, DTYPE, 0), *node.output)],
    (DOMAIN, SEND): lambda node, read: read,
    (DOMAIN, RECV): lambda node, read: [(_VALUE, _message(node))],
    **{(DOMAIN, op): _unknown for op in (*LOOKUPS, *BODIES)},
    # zeros of a rank without a part in a collective; sizes of shards, for which ranks may ask other values
    **dict.fromkeys((("", "ConstantOfShape"), ("", "Shape"), ("", "Size")), _unknown),
    **dict.fromkeys((("", "Identity"), ("", "Expand")), lambda node, read: read[:1]),
    ("", "Cast"): _widened,
    ("", "Constant"): _literal,
    **{("", op): _moved for op in _RESHARDS},
}
"""Maps each op to a function from the origins of its operands to those of its results; other communication returns its operand as its
result.
"""


def _numbers(constant: TensorProto | AttributeProto) -> Origin:
    """Returns the numbers of a constant, without its name."""
    copy = type(constant)()
    copy.CopyFrom(constant)
    copy.ClearField("name")
    kind = constant.data_type if isinstance(constant, TensorProto) else constant.type
    return CONSTANT, kind, copy.SerializeToString(deterministic=True)


def _resolved(known: Mapping[str, Origin], sent: Mapping[str, Origin], name: str) -> Origin:
    """Returns the origin of an operand; for one from another rank, the origin that it has there."""
    origin = known.get(name, (_VALUE, name))
    for _ in range(_MOST_HOPS):
        if origin[0] is not _VALUE:
            break
        origin = sent.get(str(origin[1]), origin)
    return origin


def _difference(first: NamedNode, node: NamedNode, subject: Subject) -> str:
    """Returns the difference of a node from the first of its name; '' if there is none, or it is due to sizes or microbatches."""
    training = subject.training
    if (first.node.domain, first.node.op_type) != (node.node.domain, node.node.op_type):
        if first.program != node.program and {first.node.op_type, node.node.op_type} <= _MASKS:
            return ""  # a training draws a mask where an evaluation hands values on
        return f"it is {first.node.op_type} in {first.file}"
    names = {name for name, _ in first.attributes.items() ^ node.attributes.items()}
    names -= _MODES if first.program != node.program else set()
    names -= _REWRITTEN if training is not None and first.program != node.program else set()
    names -= _COUNTS if names and _sizes(first) != _sizes(node) else set()
    if names:
        return f"its attribute {min(names)} differs from that in {first.file}"
    if metadata_of(node.node, PHASE) == _UPDATE:
        return ""  # that copies stay equal is proven by their numbers, and a sum over a target's gradients is called after it
    for at, (one, two) in enumerate(zip(first.operands, node.operands, strict=False)):
        if first.program != node.program and not _are_comparable(one, two, {first.program, node.program}, subject):
            continue
        if not _same(one, two, first, node):
            return f"its operand '{node.node.input[at]}' is {_text(two)}, and {_text(one)} in {first.file}"
    return ""


def _same(left: Origin, right: Origin, first: NamedNode, node: NamedNode) -> bool:
    """Whether operands are the same, or integer constants of nodes on shards of other sizes, or made of one source in a rewritten form.

    A source is rewritten in a program that trains, and where its sizes are obtained differently; the nodes of its gradient are not.
    """
    if left == right or _VALUE in (left[0], right[0]):
        return True
    if left[0] is right[0] is _INPUT:  # else it is an input that is not fed to this rank
        same = left[1] == right[1] and (first.program != node.program or len(left) != len(right))
        return same or left[1] not in node.types
    if (
        left[0] is right[0] is CONSTANT
    ):  # places, sizes and choices, which are a rank's own where the node is not the model's
        by_rank = _name_and_path(node.node)[0] != source_path(node.node)
        kinds = (*_INTEGERS, TensorProto.BOOL) if by_rank else _INTEGERS if _sizes(first) != _sizes(node) else ()
        return left[1] == right[1] and left[1] in kinds
    if len(left) < 3 or len(right) < 3:
        return False
    if not left[2] or not right[2]:
        return first.program != node.program  # what a program adds by itself
    if first.program == node.program:
        return left[2] == right[2] and not metadata_of(node.node, PHASE)
    return f"{left[2]}.".startswith(f"{right[2]}.") or f"{right[2]}.".startswith(f"{left[2]}.")


def _is_of_loss(node: NodeProto, training: TrainingRecord | None) -> bool:
    """Whether a node belongs to a loss or a metric, which depend on the number of microbatches."""
    names = () if training is None else (training.loss, *training.metrics, *training.denominators.values())
    return any(f"{source_path(node)}.".startswith(f"{name}.") for name in names)


def _are_comparable(first: Origin, two: Origin, programs: set[str], subject: Subject) -> bool:
    """Whether operands in two programs are known to correspond: results of nodes that both programs have, and tensors.

    A program that trains makes some values differently, and attention is fused if a step has no more tokens than a mask shows.
    """
    if all(len(origin) == 3 and isinstance(origin[2], str) for origin in (first, two)):
        return all(programs <= subject.known.programs.get(origin, set()) for origin in (first, two))
    return subject.training is None or (_is_tensor(first) and _is_tensor(two))


def _is_tensor(origin: Origin) -> bool:
    """Whether an origin is a weight or a tensor of the state."""
    return len(origin) == 1


def _sizes(own: NamedNode) -> tuple[object, ...]:
    """Returns the declared types of a node's operands and of its first result."""
    return tuple(own.types.get(name) for name in (*own.node.input, *own.node.output[:1]))


def _text(origin: Origin) -> str:
    if origin[0] is CONSTANT:
        return "another constant"
    return f"'{origin[1] if origin[0] is _VALUE else origin[0]}'"
