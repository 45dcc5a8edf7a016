"""Proves that the gradients of a batch's parts are added up: all of them, each to its own sum, where the sum lies.

    begin      a sum has no value of its own in the file, and begins as zeros
    part       one node replaces it, `x.grad.sum.next = Add(x.grad.sum, gradient)`, or a scatter that adds rows to it: neither reads an
               element once it is written, so the result may lie where the sum does; no other node reads the sum or the result
    last part  the step reads it once, by such a node
    gradient   what a part adds is what the step adds of the last part: both have one number (`value_numbering.py`)

On several ranks a sum is a term, and terms differ. Where they do not, copies of what is made of them stay equal, and that is to be
proven, too: sums are in one class if they are replaced alike wherever those of each class are equal. The classes are found by
splitting until no sum of a class differs; the law then holds by induction over the parts, since all sums begin as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.format import GRADIENT, MANIFEST, Manifest, StateRecord
from partc.runtime.artifact.onnx_graph import node_title, path_of, reads
from partc.runtime.checker.graph.declared import ValueType, declared_types
from partc.runtime.checker.training.value_numbering import Classes, Held, Numbering
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"
_SCATTERS = ("ScatterElements", "ScatterND")


def check_sums(file: str, model: ModelProto, records: Sequence[StateRecord]) -> Iterator[Violation]:
    """What is wrong with the sums in one rank file; `records` are those of its rank."""
    sums = [record for record in records if record.kind == GRADIENT]
    if not sums:
        return
    nodes, types = model.graph.node, declared_types(model)
    makers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for name in filter(None, node.output):
            makers.setdefault(name, []).append(at)
        for name in dict.fromkeys(reads(node)):
            readers.setdefault(name, []).append(at)
    outputs = {port.name for port in model.graph.output}
    for record in sums:
        title, read = f"state '{record.value}'", readers.get(record.value, [])
        if any(tensor.name == record.value for tensor in model.graph.initializer):
            yield Violation(file, "it has a first value; a sum of gradients begins as zeros", title, help=_AGAIN)
        if record.value in outputs:
            yield Violation(file, "the graph gives it as an output; it lives within a step", title, help=_AGAIN)
        adders = makers.get(record.next, []) if record.next else read[:1]
        if len(adders) != 1:
            lost = f"{len(adders)} nodes make '{record.next}', which takes its place; it must be one"
            fact = lost if record.next else "no node reads it: of the parts of a batch all but the last are lost"
            yield Violation(file, fact, title, help=_AGAIN)
            continue
        adder = nodes[adders[0]]
        for fact in _wrong_sum(adder, record.value, types):
            yield Violation(file, fact, node_title(adder), path_of(adder), _AGAIN)
        for at in read:
            if at != adders[0]:
                fact = f"it reads '{record.value}' beside {node_title(adder)}, which must be the only one"
                yield Violation(file, fact, node_title(nodes[at]), path_of(nodes[at]), _AGAIN)
        for at in readers.get(record.next, []) if record.next else ():
            fact = f"it reads '{record.next}', which is the memory of '{record.value}' in the next part"
            yield Violation(file, fact, node_title(nodes[at]), path_of(nodes[at]), _AGAIN)


def _wrong_sum(node: NodeProto, sum: str, types: Mapping[str, ValueType]) -> Iterator[str]:
    """What keeps a node from adding to a sum in its place."""
    operands = list(node.input)
    reduction = next((one.s for one in node.attribute if one.name == "reduction"), b"")
    plain = not node.domain and len(node.output) == 1 and operands.count(sum) == 1
    scatters = node.op_type in _SCATTERS and reduction == b"add" and operands[:1] == [sum]
    if not plain or not (scatters or (node.op_type == "Add" and len(operands) == 2)):
        call = f"{node.op_type}({', '.join(operands)})"
        yield f"it makes '{next(iter(node.output), '')}' as {call}; it must add a gradient to '{sum}', once"
    elif not scatters:
        (name,) = (one for one in operands if one != sum)
        if name in types and not _spreads(types[name], types[sum]):
            one, two = (" ".join(map(str, types[each])) for each in (name, sum))
            yield f"it adds '{name}', {one}, to '{sum}', {two}; a gradient is as large as its sum"


def _spreads(one: ValueType, whole: ValueType) -> bool:
    """Whether adding a value to another makes nothing larger than that; sizes that are not known may fit."""
    if one[0] != whole[0] or one[1] is None or whole[1] is None:
        return one[0] == whole[0]
    pairs = zip(reversed(one[1]), reversed(whole[1]), strict=False)
    return len(one[1]) <= len(whole[1]) and all(a in (1, b) or not isinstance(a, int) for a, b in pairs)


def classes_of(folder: Path, manifest: Manifest, models: Mapping[int, ModelProto]) -> tuple[Classes, dict[Held, int]]:
    """Which sums are equal after any number of parts, and the numbers of what they are replaced by; the files are sound."""
    held = {(rank, one.value): one for one in manifest.state if one.kind == GRADIENT for rank in one.ranks}
    keys = {key: (one.tensor, str(one.shard(key[0]))) for key, one in held.items()}
    classes = Classes(_numbered(keys))
    while True:
        numbering = Numbering(folder, manifest, models, classes)
        if not numbering.done:
            return Classes(), {}
        made = {key: numbering.numbers[key[0]][one.next] for key, one in held.items()}
        finer = _numbered({key: (classes.of[key], number) for key, number in made.items()})
        if len({*finer.values()}) == len({*classes.of.values()}):
            return classes, made
        classes = Classes(finer)


def check_parts(numbering: Numbering, made: Mapping[Held, int]) -> Iterator[Violation]:
    """Each gradient that the parts add is the one that the step adds; `made` is what `classes_of` found."""
    manifest, seen = numbering.manifest, set()
    for rank, value in made:
        nodes = numbering.models[rank].graph.node
        adder = next(node for node in nodes if value in node.input)
        file = manifest.program(rank)
        if numbering.numbers[rank][adder.output[0]] != made[rank, value] and (file, value) not in seen:
            seen.add((file, value))
            fact = f"what it adds to '{value}' is not what the other parts of the batch add to it"
            yield Violation(file, fact, node_title(adder), path_of(adder), _AGAIN)


def check_accumulation(manifest: Manifest, inner: Manifest | None) -> Iterator[Violation]:
    """The sums of a step are those that its parts make, and all of them; `inner` is None where the parts have no program."""
    training = manifest.training
    count = training.accumulate if training is not None else 1
    if (count > 1) != (inner is not None):
        there = "has" if inner is not None else "names no folder with"
        fact = f"it {there} a program of the parts of a batch, which it cuts into {count}"
        yield Violation(MANIFEST, fact, "training", help=_AGAIN)
    made = {(one.value, rank) for one in inner.state if one.kind == GRADIENT for rank in one.ranks} if inner else set()
    for record in manifest.state:
        if record.kind != GRADIENT:
            continue
        title = f"state '{record.value}'"
        if record.next:
            fact = f"'{record.next}' takes its place; a step ends the sum, and only the parts before replace it"
            yield Violation(MANIFEST, fact, title, help=_AGAIN)
        if lost := [rank for rank in record.ranks if (record.value, rank) not in made]:
            fact = f"on rank {lost[0]} no part of a batch adds to it"
            yield Violation(MANIFEST, fact, title, help=_AGAIN)


def _numbered(keys: Mapping[Held, object]) -> dict[Held, int]:
    """The same with a number for each value, in the order in which values come."""
    numbers: dict[object, int] = {}
    return {held: numbers.setdefault(key, len(numbers)) for held, key in keys.items()}
