"""Reads a model from an `.onnx` file, or refuses it with all its problems.

Weights in files next to the model stay there: they are memory-mapped and read once, when the artifact is written. The file's opset stays,
from 7 to 26: placement works with any of them, and a conversion that is not needed can only do harm. Opset 6 becomes 7.

The checks cover the structure that every graph must have: each value defined once, weights with data, the attributes that ops require.

Renames the inputs' dynamic dims before anything reads them: each name becomes an identifier, and different names stay different.

ONNX allows any text as the name of a dim. All later passes, the manifest and the plan write dims in expressions, so a name must be valid
in an expression: `batch size` becomes `batch_size`, `Max(n` becomes `Max_n`, `past + 1` becomes `past_1`. Texts that mark an unknown size
are not names: `?`, `-1`, `None`, `unk`, an empty text, or the size -1. Exporters write them for any dim of unknown size, so two such dims
are not equal, as in onnxruntime.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass
from partc.compiler.dims.symbol import identifier
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.functions import extent_of, inline_calls
from partc.compiler.frontend.names import free_name
from partc.compiler.frontend.older_forms import OLDER, has_older_forms, modern
from partc.compiler.frontend.preserved import preserving_operands
from partc.compiler.frontend.torch.torch_file import restored
from partc.compiler.ir.graph import NEWEST_OPSET, OWN_NAME, bodies, graphs_of, is_inside, nodes_of
from partc.runtime.artifact.graph.onnx_graph import LARGEST_MODEL, graph_bodies, node_title, not_text, short_splits
from partc.runtime.errors import breaks_lines, one_line, reason_of
from partc.runtime.files.counted import MOST_NODES
from partc.runtime.files.regular import fault, read_regular
from partc.runtime.garbage_collection import uncollected


def structure_problems(graph: ir.Graph, where: str, outer: frozenset[ir.Value] = frozenset()) -> list[Problem]:
    """Returns the problems of values that are undefined or defined twice, and of weights without data."""
    problems = []
    defined = set(outer) | set(graph.inputs) | set(graph.initializers.values())
    for value in graph.initializers.values():
        if value.const_value is None:
            problems.append(
                Problem(where, f"the weight '{value.name}' has no data", help="export the model with its weights")
            )
    nodes = list(graph)
    for node in nodes:
        defined.update(node.outputs)
    names: set[str] = set()
    for value in defined - outer:
        if value.name and value.name in names:
            problems.append(Problem(where, f"the value '{value.name}' is defined twice", help="export the model again"))
        names.add(value.name or "")
    for node in nodes:
        if not defined.issuperset(node.inputs):
            problems += [
                Problem(
                    where,
                    f"'{value.name}', read by {node.op_type} '{node.name}', is defined nowhere",
                    help="export the model again",
                )
                for value in node.inputs
                if value is not None and value not in defined
            ]
        for body in bodies(node):
            problems += structure_problems(body, where, frozenset(defined))
    problems += [
        Problem(where, f"the output '{value.name}' is defined nowhere", help="export the model again")
        for value in graph.outputs
        if value not in defined
    ]
    return problems


def missing_attributes(model: ir.Model, where: str) -> list[Problem]:
    """Returns the problems of nodes without an attribute that their op requires; no runtime loads such a node."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    return [
        Problem(
            where,
            f"{node.op_type} '{node.name or node.outputs[0].name}' has no attribute '{name}', which it needs",
            help="export it again",
        )
        for node in nodes_of(model.graph)
        if node.domain in ("", "ai.onnx")
        for name in _required(node.op_type, opset)
        if name not in node.attributes
    ]


@cache
def _required(op_type: str, opset: int) -> tuple[str, ...]:
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return ()
    return tuple(name for name, attribute in sorted(schema.attributes.items()) if attribute.required)


_KNOWN_OPSET = 21
"""An opset that every supported version of onnxruntime implements."""
_TABULAR, _MAPS = "ai.onnx.ml", ("CastMap", "DictVectorizer", "ZipMap")
_DEEPEST, _MOST_LOOPS, _DEEPEST_CALLS = 60, 6, 100


def load_onnx(path: Path) -> ir.Model:
    """Loads the model at `path` with its functions inlined, its nodes in topological order, and its external weights memory-mapped.

    Raises CompileError for a missing or broken file, an opset outside 6..26, an op or domain that onnxruntime does not
    know, external weights that are missing, too short or outside of the model's folder, and values that nothing defines.
    """
    try:
        data = read_regular(path, LARGEST_MODEL)
    except OSError as error:
        raise CompileError(not_read(path, error)) from None
    try:
        proto = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf raises its own kinds, by version
        raise CompileError(
            Problem(
                str(path), f"is not an ONNX model: {error}", help="check that the file is complete, or export it again"
            )
        ) from error
    return from_proto(proto, path)


def not_read(path: Path, error: OSError) -> Problem:
    """Returns the problem of a model's file that cannot be read."""
    fact = "no such file" if isinstance(error, FileNotFoundError) else reason_of(error)
    return Problem(
        str(path), fact, help="pass the path of a model.py, a .onnx file or a folder of a model of transformers"
    )


@uncollected()
def from_proto(proto: onnx.ModelProto, path: Path) -> ir.Model:
    """Loads a model as `load_onnx` does, from a proto in memory; `path` names it in errors, and its folder has the external data."""
    where = path.name
    if not proto.opset_import or not proto.HasField("graph"):
        raise CompileError(
            Problem(
                where,
                "is not an ONNX model: it has no graph or no opset",
                help="check that the file is complete, or export it again",
            )
        )
    _raise(_opset_problems(proto, where))
    if has_older_forms(proto):
        proto, problems = modern(proto, where)
        _raise(problems)
    _raise(_more_than_are_read(len(proto.graph.node), where))  # before any check iterates over them
    if broken := not_text(proto):
        fact = f"has a name or a text that is not UTF-8: {broken}"
        raise CompileError(Problem(where, fact, help="check that the file is complete, or export it again"))
    _raise(_nesting_problems(proto.graph, where))
    _raise(_map_problems(proto, where))
    _raise(_extent_problems(proto, where))
    _raise(
        [
            Problem(where, f"{node_title(node)}: {fact}", help="correct num_outputs, or export it again")
            for nodes in (proto.graph.node, *(function.node for function in proto.functions))
            for node, fact in short_splits(nodes)
        ]
    )
    try:
        with _quiet():
            model = ir.from_proto(_inlined(proto))
    except Exception as error:
        raise CompileError(
            Problem(where, f"is broken: {error}", help="see onnx.checker.check_model, or export it again")
        ) from error
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for _, tensor in _external(graph):
            tensor.base_dir = path.parent
    return restored(checked(model, where))


def checked(model: ir.Model, where: str) -> ir.Model:
    """Inlines and sorts `model`, and removes weights from its inputs. Raises CompileError for the faults that `load_onnx` names."""
    _raise(_names_on_lines(model, where))
    _raise(name_input_dims(model.graph, where))
    for node in nodes_of(model.graph):
        node.meta[OWN_NAME] = node.name or ""
    if model.functions:
        with preserving_operands(model, where):
            model = _without_calls(model, where)
    # old exporters list a weight as a graph input too
    for value in [value for value in model.graph.inputs if value.name in model.graph.initializers]:
        model.graph.inputs.remove(value)
    problems = [
        *_unknown_ops(model, where),
        *structure_problems(model.graph, where),
        *missing_attributes(model, where),
        *_external_problems(model.graph, where),
    ]
    _raise(problems)
    _read_constants(model.graph)
    if not _is_sorted(model.graph):
        try:
            TopologicalSortPass()(model)
        except Exception as error:
            raise CompileError(Problem(where, "the graph has a cycle", help="export the model again")) from error
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which onnx-ir does not log values that nothing defines: `checked` reports them."""
    log = logging.getLogger("onnx_ir")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _names_on_lines(model: ir.Model, where: str) -> list[Problem]:
    """Returns the problems of names that contain a line end, which no message and no dump can show."""
    kinds: dict[str, str] = {}
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ports = [*graph.inputs, *graph.initializers.values()]
        kinds |= {value.name or "": "value" for value in ports}
        for value in graph.inputs:
            kinds |= {str(dim): "dim" for dim in value.shape or ()}
        for node in nodes_of(graph):
            kinds[node.name or ""] = "node"
            kinds[node.op_type] = "op"
            kinds[node.domain] = "domain"
            for value in node.outputs:
                kinds[value.name or ""] = "value"
            kinds |= dict.fromkeys(node.attributes.data, "attribute")
    if not breaks_lines("".join(kinds)):
        return []
    help_ = "rename it"
    return [
        Problem(where, f"the name '{one_line(name)}' of a{'n' * (kind[0] in 'ao')} {kind} has a line end", help=help_)
        for name, kind in kinds.items()
        if breaks_lines(name)
    ]


def _without_calls(model: ir.Model, where: str) -> ir.Model:
    try:
        return inline_calls(model)
    except Exception as error:  # the inliner raises errors of its own for recursive calls and wrong arguments
        fact = f"its functions cannot be written out where they are called: {error}"
        raise CompileError(Problem(where, fact, help="see onnx.checker.check_model, or export it again")) from error


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise CompileError(dict.fromkeys(problems))


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with its functions inlined by onnx where an opset differs from the model's, since onnx converts; else unchanged."""
    own = {entry.domain: entry.version for entry in proto.opset_import}
    if any(own.get(e.domain, e.version) != e.version for f in proto.functions for e in f.opset_import):
        import onnx.inliner

        return onnx.inliner.inline_local_functions(onnx.shape_inference.infer_shapes(proto), convert_version=True)
    return proto


def _opset_problems(proto: onnx.ModelProto, where: str) -> list[Problem]:
    problems = []
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and not OLDER <= entry.version <= NEWEST_OPSET:
            remedy = (
                f"export it again, or convert it: onnx.version_converter.convert_version(onnx.load('{where}'), {OLDER})"
            )
            if entry.version > NEWEST_OPSET:
                remedy = f"export it with opset {NEWEST_OPSET} or lower: onnxruntime runs no later one"
            problems.append(
                Problem(where, f"opset {entry.version} is outside of {OLDER} to {NEWEST_OPSET}", help=remedy)
            )
    return problems


def _nesting_problems(graph: onnx.GraphProto, where: str) -> list[Problem]:
    """Returns a problem where bodies nest deeper than passes can follow: each loop is inferred several times, with all that it contains."""
    waiting = [(graph, 0, 0)]
    while waiting:
        owner, depth, loops = waiting.pop()
        if depth > _DEEPEST or loops > _MOST_LOOPS:
            fact = (
                f"its bodies of If, Loop and Scan lie more than {_DEEPEST} deep in each other, or {_MOST_LOOPS} loops"
            )
            return [Problem(where, fact, help="write the inner ones without a body, or compile a part of the model")]
        for node in owner.node:
            inner = loops + (node.op_type in ("Loop", "Scan"))
            waiting += [(body, depth + 1, inner) for body in graph_bodies(node)]
    return []


def _map_problems(proto: onnx.ModelProto, where: str) -> list[Problem]:
    """Returns the problems of ops that take or make maps, which no rank can store, send or deliver, and of maps as inputs and outputs."""
    law = "a value is a tensor, a sequence of tensors or an optional one"
    without = "export it without: options={'zipmap': False} of skl2onnx, zipmap=False of onnxmltools"
    with_arrays = "fit the model on arrays or columns in place of dictionaries, and export it again"
    problems = []
    for node in (node for nodes in (proto.graph.node, *(one.node for one in proto.functions)) for node in nodes):
        if node.domain == _TABULAR and node.op_type in _MAPS:
            made = node.op_type == "ZipMap"
            fact = f"{node_title(node)} {'makes a sequence of maps' if made else 'takes maps'}"
            problems.append(Problem(where, fact, law, without if made else with_arrays))
    ports = [("input", port) for port in proto.graph.input] + [("output", port) for port in proto.graph.output]
    for kind, port in ports if not problems else ():
        if _has_map(port.type):
            problems.append(Problem(where, f"{kind} '{port.name}' is a map", law, with_arrays))
    return problems


def _has_map(kind: onnx.TypeProto) -> bool:
    match kind.WhichOneof("value"):
        case "map_type":
            return True
        case "sequence_type":
            return _has_map(kind.sequence_type.elem_type)
        case "optional_type":
            return _has_map(kind.optional_type.elem_type)
    return False


def _extent_problems(proto: onnx.ModelProto, where: str) -> list[Problem]:
    """Returns a problem where the model, with its functions inlined, has too many nodes, or where calls nest too deep."""
    try:
        extent = extent_of(proto)
    except ValueError as error:
        return [Problem(where, f"its functions cannot be written out: {error}", help="export the model again")]
    if extent.depth > _DEEPEST_CALLS:
        fact = f"its functions call each other {extent.depth:,} deep; at most {_DEEPEST_CALLS} are read"
        return [Problem(where, fact, help="write the inner ones out where they are called")]
    return _more_than_are_read(extent.nodes, where)


def _more_than_are_read(count: int, where: str) -> list[Problem]:
    if count <= MOST_NODES:
        return []
    fact = (
        f"it has {count:,} nodes with its functions written out where they are called; at most {MOST_NODES:,} are read"
    )
    return [Problem(where, fact, help="compile a part of the model, or call its functions less often")]


@cache
def _known_ops() -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
    """Returns the (domain, op) pairs and the domains for which the installed onnxruntime has a schema."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known = frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())
    return known, frozenset(domain for domain, _ in known)


@cache
def _is_standard(domain: str, op_type: str) -> bool:
    """Whether an op is in the ONNX standard of `_KNOWN_OPSET`, which every onnxruntime knows, so that the check need not load it."""
    return not domain and onnx.defs.has(op_type, _KNOWN_OPSET, "")


def _unknown_ops(model: ir.Model, where: str) -> list[Problem]:
    found: dict[tuple[str, str], list[ir.Node]] = {}
    for node in nodes_of(model.graph):
        found.setdefault(("" if node.domain == "ai.onnx" else node.domain, node.op_type), []).append(node)
    left = {key: nodes for key, nodes in found.items() if not _is_standard(*key)}
    if not left:
        return []
    known, domains = _known_ops()
    count = {
        key: names
        for key, nodes in left.items()
        if key not in known and (names := [node.name or "unnamed" for node in nodes if not is_inside(node)])
    }
    problems = []
    for (domain, op_type), names in sorted(count.items()):
        op = f"{domain}::{op_type}" if domain else op_type
        fact = f"onnxruntime does not know the op {op} ({len(names)} times, first '{names[0]}')"
        law = (
            ""
            if domain in domains
            else f"it knows no domain '{domain}'; its domains are {', '.join(sorted(d or 'ai.onnx' for d in domains))}"
        )
        problems.append(
            Problem(where, fact, law, "decompose it into standard ops, or define it as a model-local function")
        )
    return problems


def _external(graph: ir.Graph) -> Iterator[tuple[str, ir.ExternalTensor]]:
    """Yields every tensor whose data is in another file, weights and attributes of nodes, each with a title for messages."""
    for part in graphs_of(graph):
        for value in part.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield f"the weight '{value.name}'", value.const_value
        for node in part:
            for attribute in node.attributes.data.values():
                for tensor in _tensors_of(attribute):
                    if isinstance(tensor, ir.ExternalTensor):
                        yield f"'{attribute.name}' of {node.op_type} '{node.name or ''}'", tensor


def _tensors_of(attribute: ir.Attr) -> Sequence[ir.TensorProtocol]:
    kind = attribute.type
    if kind not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS) or attribute.is_ref():
        return ()
    return (attribute.value,) if kind == ir.AttributeType.TENSOR else attribute.value


def _external_problems(graph: ir.Graph, where: str) -> list[Problem]:
    problems = []
    files = cache(_weights_file)
    for title, tensor in _external(graph):
        fault_of_file, remedy, have = files(str(tensor.base_dir), str(tensor.location))
        offset, length, size = tensor.offset or 0, tensor.length, tensor.nbytes
        if fault_of_file:
            fact = f"{title} {fault_of_file}"
        elif offset < 0 or size < 0 or (length is not None and length < 0):
            fact, remedy = f"{title} lies at bytes {offset} to {offset + size}", "export the model again"
        elif have < offset + size:
            fact = f"'{tensor.location}' is truncated: {title} ends at byte {offset + size} of {have}"
            remedy = "copy the weights file again"
        else:
            continue
        problems.append(Problem(where, fact, help=remedy))
    return problems


def _weights_file(base: str, location: str) -> tuple[str, str, int]:
    """Returns the fault of a file of weights ("" where it has none), the remedy, and the file's bytes."""
    file = Path(base, location)
    if not file.resolve().is_relative_to(Path(base).resolve()):
        remedy = "keep weights beside the model, the files themselves and no links to them"
        return f"points outside of the model's folder: {location}", remedy, 0
    if not os.path.lexists(file):
        return f"is in '{location}', which is missing", "copy the weights file beside the model", 0
    if why := fault(file):
        return f"is in '{location}', which {why}", "use a file of its elements", 0
    return "", "", file.stat().st_size


def _read_constants(graph: ir.Graph) -> None:
    """Reads the external tensors of attributes into memory, since a rank's file has no external data for them."""
    for part in graphs_of(graph):
        for node in part:
            for name, attribute in list(node.attributes.data.items()):
                found = _tensors_of(attribute)
                if not any(isinstance(tensor, ir.ExternalTensor) for tensor in found):
                    continue
                read = [ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name) for tensor in found]
                value = read[0] if attribute.type == ir.AttributeType.TENSOR else read
                node.attributes[name] = ir.Attr(name, attribute.type, value)


def _is_sorted(graph: ir.Graph) -> bool:
    for part in graphs_of(graph):
        nodes = list(part)
        later = {value for node in nodes for value in node.outputs}
        for node in nodes:
            if not later.isdisjoint(node.inputs):
                return False
            later.difference_update(node.outputs)
    return True


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
