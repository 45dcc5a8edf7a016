"""Dotted paths of nodes, and names that follow from them.

A node's path is its module's path and its own name: `layers.0.mlp.up.MatMul`. Builders write the module into the node's metadata:
onnxscript as a list of names (`['net', 'fc1']`, the root first), torch as a list of whole paths that ends with its own name of the node
(`['', 'layers.0', 'layers.0.fc', 'linear']`). The root's name is left out. The own name is the author's, else the op's type; if several
nodes in one module have the same name, the later ones get `_1`, `_2`.

A node of such a model that lost its metadata belongs to the deepest module that all its neighbours share. In a model without any such
metadata the path is the node's name; an unnamed node is `<OpType>_<k>`, the k-th unnamed one of its type, and a repeated name gets `_1`,
`_2`. A call of a model's own function counts as a module with its node's name, `block1.Relu`, except in a file of torch's, whose functions
are torch's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import onnx_ir as ir
from partc.compiler.frontend.functions import CALLS
from partc.compiler.ir.graph import OWN_NAME, nodes_of
from partc.runtime.errors import one_line
from partc.runtime.spellings import first_free, numbered

ONNXSCRIPT_SCOPES = "pkg.onnxscript.name_scopes"
TORCH_SCOPES = "pkg.torch.onnx.name_scopes"

_COUNTED = re.compile(r"_node_\d+$")
_COUNTER = re.compile(r"_\d+")
# torch numbers a module's second call in its path: `relu@1`.
_CALL = re.compile(r"@\d+")
# torch traces a module that calls cond, scan or while_loop below a root of its own.
_TRACED_ROOT = re.compile(r"_export_root(\.|\Z)")
_TORCH_UNKNOWN = "_empty_nn_module_stack_from_metadata_hook"


@dataclass(frozen=True)
class _Name:
    """A node's module, None if unknown, and its own name; `is_from_user` if its author chose it."""

    scope: str | None
    own: str
    is_from_user: bool


def node_paths(model: ir.Model) -> dict[ir.Node, str]:
    """Returns the path of every node of the main graph, in the graph's order; paths are unique."""
    return _paths(_names(model.graph), "")


def body_paths(body: ir.Graph, owner: str, prefix: str) -> dict[ir.Node, str]:
    """Returns the paths of a body's nodes relative to a turn: their names without `prefix`, else as for a main graph in module `owner`."""
    if all((node.name or "").startswith(prefix) for node in body):
        return {node: (node.name or "").removeprefix(prefix) for node in body}
    return _paths(_names(body), owner)


def derive_names(model: ir.Model, constants: Iterable[ir.Value] = ()) -> None:
    """Renames the nodes to their paths, and the values to their node's path (`<path>.<k>` if the node has several outputs).

    Bodies of If, Loop and Scan are named likewise, below their node's path. Inputs, outputs and initializers of the main graph keep their
    names, except `constants`, which are named by their first use: `conv1.Reshape.shape`.
    """
    graph = model.graph
    unnamed = list(constants)
    kept = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    taken = {value.name for value in kept if value.name} - {value.name for value in unnamed}
    outputs = set(graph.outputs)
    paths: dict[ir.Node, str] = {}
    for node, path in _all_paths(graph, ""):
        paths[node] = path
        node.name = path
        named = [(k, value) for k, value in enumerate(node.outputs) if value.name != ""]
        for k, value in named:
            if value not in outputs:
                value.name = free_name(path if len(named) == 1 else f"{path}.{k}", taken)
    _name_by_use(unnamed, paths, taken)


def name_by_use(model: ir.Model, constants: Iterable[ir.Value]) -> None:
    """Renames initializers of the main graph by their first use, as `derive_names` does; all other names stay."""
    unnamed = [value for value in constants if value.uses()]
    graph = model.graph
    taken = {value.name or "" for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {value.name or "" for node in nodes_of(graph) for value in node.outputs}
    _name_by_use(unnamed, dict(_all_paths(graph, "")), taken - {value.name or "" for value in unnamed})


def module_of(node: ir.Node) -> str | None:
    """Returns the module of a node that torch exported; None if its metadata do not name it."""
    return _torch_name(node).scope


def _name_by_use(unnamed: list[ir.Value], paths: dict[ir.Node, str], taken: set[str]) -> None:
    order = {node: index for index, node in enumerate(paths)}
    for k, value in enumerate(unnamed):
        value.name = f"{_UNNAMED}{k}"
    for value in unnamed:
        uses = [use for use in value.uses() if use.node in order]
        if uses:
            first = min(uses, key=lambda use: (order[use.node], use.idx))
            value.name = free_name(f"{paths[first.node]}.{_operand(first.node, first.idx)}", taken)


# Stands for a constant's name while all of them are renamed: an initializer's name must be free at any time.
_UNNAMED = "partc.constant."


def _paths(names: Mapping[ir.Node, _Name], owner: str) -> dict[ir.Node, str]:
    """The paths of nodes relative to the module `owner`, whose own path they do not repeat."""
    whole = {
        node: f"{scope}.{name.own}" if (scope := _below(name.scope or "", owner)) else name.own
        for node, name in names.items()
    }
    taken: set[str] = set()
    left: dict[str, Iterator[str]] = {}
    found: dict[ir.Node, str] = {}
    for given in (True, False):
        for node, name in names.items():
            if name.is_from_user is given:
                found[node] = free_name(whole[node], taken, left)
    return {node: found[node] for node in names}


def _all_paths(graph: ir.Graph, owner: str) -> Iterator[tuple[ir.Node, str]]:
    """The nodes with their paths, each followed by the nodes of its bodies."""
    names = _names(graph)
    for node, path in _paths(names, owner).items():
        yield node, path
        for attribute in node.attributes.data.values():
            if attribute.type == ir.AttributeType.GRAPH:
                bodies = [(attribute.name, attribute.as_graph())]
            elif attribute.type == ir.AttributeType.GRAPHS:
                bodies = [(f"{attribute.name}.{k}", body) for k, body in enumerate(attribute.as_graphs())]
            else:
                continue
            for name, body in bodies:
                for inner, inner_path in _all_paths(body, names[node].scope or ""):
                    yield inner, f"{path}.{name}.{inner_path}"


def _names(graph: ir.Graph) -> dict[ir.Node, _Name]:
    nodes = list(graph)
    if any(TORCH_SCOPES in node.metadata_props for node in nodes):
        names = {node: _torch_name(node) for node in nodes}
    elif any(ONNXSCRIPT_SCOPES in node.metadata_props for node in nodes):
        names = {node: _within_calls(node, _onnxscript_name(node)) for node in nodes}
    else:
        return _plain_names(nodes)
    scopes = _scopes_by_neighbours({node: name.scope for node, name in names.items()})
    return {node: _Name(scopes[node], name.own, name.is_from_user) for node, name in names.items()}


def _plain_names(nodes: list[ir.Node]) -> dict[ir.Node, _Name]:
    existing = {node.name for node in nodes if node.name}
    unnamed: dict[str, Iterator[str]] = {}
    """Maps each op type to the spellings that no node has yet."""
    names: dict[ir.Node, _Name] = {}
    for node in nodes:
        if CALLS in node.meta:
            names[node] = _within_calls(node, _Name("", node.op_type, is_from_user=False))
            continue
        if node.name:
            names[node] = _Name("", node.name, is_from_user=True)
            continue
        spellings = unnamed.setdefault(node.op_type, numbered(node.op_type, begin=0))
        free = next(spelling for spelling in spellings if spelling not in existing)
        names[node] = _Name("", free, is_from_user=False)
    return names


def _within_calls(node: ir.Node, name: _Name) -> _Name:
    """Returns the name of a node that comes from calls of functions; `name` for other nodes."""
    if CALLS not in node.meta:
        return name
    scope = ".".join(part for part in (name.scope, *(_COUNTED.sub("", call) for call in node.meta[CALLS])) if part)
    own = _COUNTED.sub("", node.meta[OWN_NAME])
    return _Name(scope, own or node.op_type, is_from_user=bool(own))


def _onnxscript_name(node: ir.Node) -> _Name:
    name = node.name or ""
    text = node.metadata_props.get(ONNXSCRIPT_SCOPES)
    if text is None:
        *modules, own = [_COUNTED.sub("", part) for part in name.split("/")] if name else [node.op_type]
        return _Name(".".join(modules) or None, own, is_from_user=not _COUNTED.search(name))
    parts = _entries(text)
    scope = ".".join(part for part in parts[1:] if part)
    if scope and name.startswith(f"{scope}."):
        return _Name(scope, name[len(scope) + 1 :], is_from_user=True)
    prefix = "/".join(part for part in parts if part)
    if prefix and name.startswith(f"{prefix}/"):
        name = name[len(prefix) + 1 :]
    own = ".".join(_COUNTED.sub("", part) for part in name.split("/")) or node.op_type
    return _Name(scope, own, is_from_user=bool(name) and not _COUNTED.search(name))


def _torch_name(node: ir.Node) -> _Name:
    """Returns a node's name in a torch file; a node that torch named by its own op and a counter is named by the ONNX op's type."""
    name = node.name or ""
    text = node.metadata_props.get(TORCH_SCOPES)
    scope = _torch_scope(text) if text else None
    if scope and name.startswith(f"{scope}."):
        return _Name(scope, name[len(scope) + 1 :], is_from_user=True)
    counter = name.removeprefix(node.op_type)
    given = not scope and name.startswith(node.op_type) and (not counter or _COUNTER.fullmatch(counter) is not None)
    return _Name(scope, name if given else node.op_type, given)


@lru_cache(maxsize=4096)
def _torch_scope(text: str) -> str | None:
    """Returns the module of a node with these scopes; None if torch does not know one of them."""
    modules = [_TRACED_ROOT.sub("", _CALL.sub("", entry), count=1) for entry in _entries(text)[:-1]]
    return modules[-1] if modules and _TORCH_UNKNOWN not in modules else None


def _scopes_by_neighbours(scopes: dict[ir.Node, str | None]) -> dict[ir.Node, str]:
    """Fills in unknown scopes: connected nodes without a scope get the deepest module that their neighbours share."""
    filled = {node: scope for node, scope in scopes.items() if scope is not None}
    for start, scope in scopes.items():
        if scope is not None or start in filled:
            continue
        members, waiting, around = {start}, [start], set[str]()
        while waiting:
            for other in _neighbours(waiting.pop()):
                if other in members or other not in scopes:
                    continue
                if (known := scopes[other]) is not None:
                    around.add(known)
                else:
                    members.add(other)
                    waiting.append(other)
        filled.update(dict.fromkeys(members, _common(around)))
    return filled


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer is not None:
            yield producer
    for output in node.outputs:
        for use in output.uses():
            yield use.node


def _common(scopes: set[str]) -> str:
    """Returns the deepest module that contains all these modules."""
    if not scopes:
        return ""
    low, high = min(parts := [scope.split(".") for scope in scopes]), max(parts)
    shared = 0
    while shared < min(len(low), len(high)) and low[shared] == high[shared]:
        shared += 1
    return ".".join(low[:shared])


@lru_cache(maxsize=4096)
def _entries(text: str) -> tuple[str, ...]:
    """Returns the strings of a list as Python prints it; any other text is one entry."""
    try:
        return tuple(one_line(str(entry)) for entry in ast.literal_eval(text)) or ("",)
    except (SyntaxError, ValueError, TypeError):
        return (one_line(text),)


def _below(scope: str, owner: str) -> str:
    if not owner:
        return scope
    if scope == owner:
        return ""
    return scope.removeprefix(f"{owner}.")


def free_name(name: str, taken: set[str], left: dict[str, Iterator[str]] | None = None) -> str:
    """Returns `name`, or `name` with the first of `_1`, `_2`, ... that is not in `taken`, and adds it to `taken`.

    `left`: maps names to their unused spellings, for callers that ask for one name many times.
    """
    spellings = numbered if left is None else lambda name: left.setdefault(name, numbered(name))
    found = first_free(name, taken.__contains__, spellings)
    taken.add(found)
    return found


def _operand(node: ir.Node, index: int) -> str:
    """Returns the op schema's name of the input of this index; `input<index>` if it is unknown."""
    import onnx.defs

    try:
        version = node.version or (node.graph.opset_imports.get(node.domain) if node.graph else None)
        inputs = onnx.defs.get_schema(node.op_type, version or onnx.defs.onnx_opset_version(), node.domain).inputs
    except onnx.defs.SchemaError:
        return f"input{index}"
    if index < len(inputs) and inputs[index].option != onnx.defs.OpSchema.FormalParameterOption.Variadic:
        return str(inputs[index].name)
    return f"input{index}"
