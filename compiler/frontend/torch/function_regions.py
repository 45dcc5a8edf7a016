"""Finds the regions of functions under `shard` or `place` in a graph that torch exported, by the markers of their calls.

A call's nodes are those on the paths from its inputs' markers to its outputs' markers. They get a scope of the function's name below the
module that calls it, `block.attend.MatMul`, as the nodes of a function that is called with an op builder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import onnx_ir as ir
from partc.compiler.directives.calls import Region, TracedCall, is_module
from partc.compiler.directives.recorder import Recorder
from partc.compiler.directives.torch_calls import DOMAIN
from partc.compiler.frontend.names import TORCH_SCOPES, module_of
from partc.runtime.spellings import first_free, numbered

_MARK = "partc.region"
"""The metadata of an Identity that stands for a marker: the call, the tensor's index, and whether it is an output of the call."""


def keep_marks(model: ir.Model) -> None:
    """Turns each marker into an Identity with its call in the metadata, so that the graph has only ops of ONNX."""
    for node in model.graph:
        if node.domain == DOMAIN:
            call, place = (node.attributes.get_int(name, 0) for name in ("call", "place"))
            node.metadata_props[_MARK] = str((call, place, node.op_type == "Leave"))
            node.domain, node.op_type = "", "Identity"
            node.attributes.clear()
    model.graph.opset_imports.pop(DOMAIN, None)
    model.opset_imports.pop(DOMAIN, None)


def take_regions(model: ir.Model, recorder: Recorder) -> None:
    """Removes the markers from the graph, and adds the region of each call to its `shard` and `place` records.

    Raises CompileError where a strategy does not fit the tensors of a call.
    """
    graph = model.graph
    marks: dict[int, dict[bool, dict[int, ir.Node]]] = {}
    for node in graph:
        if _MARK in node.metadata_props:
            call, place, leaves = ast.literal_eval(node.metadata_props.pop(_MARK))
            marks.setdefault(call, {False: {}, True: {}})[leaves][place] = node
    taken: set[str] = set()
    for number in sorted(marks):
        call, (entering, leaving) = recorder.torch_calls[number], (marks[number][False], marks[number][True])
        around = next((scope for node in chain(entering.values(), leaving.values()) if (scope := module_of(node))), "")
        wanted = f"{around}.{call.name}" if around else call.name
        path = first_free(wanted, taken.__contains__, numbered)
        taken.add(path)
        inside = _between(entering.values(), leaving.values())
        for node in inside:
            _move(node, around, path, recorder)
        region = Region(path, None, _tensors(entering, call.arguments), _tensors(leaving, call.results))
        for each in call.calls:
            each.check(region)
            each.regions.append(region)
    known = {(one.where, one.name) for call in recorder.torch_calls for one in call.calls if one.regions}

    def counts(one: TracedCall) -> bool:
        """Whether a record counts: a repeated trace of forward records the same call again, without a region."""
        return bool(one.regions) or is_module(one.target) or (one.where, one.name) not in known

    recorder.shards[:] = filter(counts, recorder.shards)
    recorder.calls[:] = filter(counts, recorder.calls)
    for node in chain.from_iterable(side.values() for sides in marks.values() for side in sides.values()):
        _take_out(node)


def _between(entering: Iterable[ir.Node], leaving: Iterable[ir.Node]) -> list[ir.Node]:
    """Returns the nodes on the paths from the entering marks to the leaving ones, in no particular order."""
    behind: set[ir.Node] = set()
    waiting = [use.node for mark in entering for use in mark.outputs[0].uses()]
    while waiting:
        node = waiting.pop()
        if node not in behind:
            behind.add(node)
            waiting += [use.node for value in node.outputs for use in value.uses()]
    before: set[ir.Node] = set()
    waiting = [maker for mark in leaving if (maker := mark.inputs[0].producer()) is not None]  # type: ignore[union-attr]
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += [maker for value in node.inputs if value is not None and (maker := value.producer()) is not None]
    return [node for node in before if node in behind]


def _move(node: ir.Node, around: str, path: str, recorder: Recorder) -> None:
    """Adds the function's scope to a node of a call; a module inside the function is named below that scope."""
    scopes = ast.literal_eval(node.metadata_props.get(TORCH_SCOPES, "[]"))
    if not scopes:
        return
    module = module_of(node) or around
    below = module.removeprefix(around).lstrip(".") if module.startswith(around) else ""
    moved = f"{path}.{below}" if below else path
    if below:
        recorder.moved[module] = moved
    node.metadata_props[TORCH_SCOPES] = str([*scopes[:-1], moved, scopes[-1]])


def _tensors(marks: Mapping[int, ir.Node], shapes: Sequence[tuple[object, ...]]) -> tuple[ir.Value, ...]:
    """Returns the tensors of one side of a call; a tensor that the function does not read has no producer and no name."""
    tensors = []
    for place, shape in enumerate(shapes):
        if (mark := marks.get(place)) is None:
            tensors.append(
                ir.Value(name="", shape=ir.Shape([None if not isinstance(dim, int) else dim for dim in shape]))
            )
        else:
            (value,) = mark.inputs
            assert value is not None
            tensors.append(value)
    return tuple(tensors)


def _take_out(node: ir.Node) -> None:
    """Removes a marker: its readers read the marked value."""
    (value,) = node.inputs
    assert value is not None
    graph, made = node.graph, node.outputs[0]
    assert isinstance(graph, ir.Graph)
    if made in graph.outputs:  # the model's output keeps its name: its producer gets it
        made.name, value.name = None, made.name
    made.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
