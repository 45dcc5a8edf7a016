"""A plan to begin with: valid YAML that places nothing, with the model's modules and parameters as comments.

The inputs stand with the dims that the model gives them, and every named dim is a symbol whose constraints wait to be
filled in. Below is the tree of modules in the order of the graph, each with its nodes, weights, share of all weights
and op types; a parameter is listed with the module of the first node that uses it. Nodes outside of modules follow, in
runs where they are many. Names are written as the plan takes them: they can be copied before a ':'.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.analysis.bindings import dim_name
from partc.compiler.dims.symbol import Symbol
from partc.compiler.ir.graph import name_of, nodes_of
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.plan.schema import is_dim_name
from partc.compiler.proposal.flow import stored_bytes
from partc.runtime.units import count, size_text

MOST_LINES = 200
RUNS = 100
WIDEST = 56

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
_OUTPUTS = (
    "# outputs: 0   # a rank, a list of ranks, producer or cut, for all of them; or one line for each:",
    "# outputs:",
)
_WORDS = {"null", "true", "false", "yes", "no", "on", "off"}


@dataclass
class _Part:
    """A module, a node or a run of nodes: what it has itself, and the modules inside it."""

    label: str
    path: str = ""
    nodes: int = 0
    bytes: int = 0
    ops: collections.Counter[str] = field(default_factory=collections.Counter)
    parameters: list[ir.Value] = field(default_factory=list)
    inside: dict[str, _Part] = field(default_factory=dict)

    def add(self, node: ir.Node, parameters: list[ir.Value]) -> None:
        self.nodes += 1
        self.ops[node.op_type] += 1
        self.bytes += sum(stored_bytes(parameter) for parameter in parameters)


@dataclass(frozen=True)
class Ports:
    """Whether a plan says something of inputs and outputs: one that generates does not, since it fixes their sizes; whether it trains.

    `listed`: whether it lists outputs and modules as comments.
    """

    stated: bool = True
    trains: bool = False
    listed: bool = True


@dataclass(frozen=True)
class Proposed:
    """What a proposal says where the starting plan has examples: comments for the head, `ranks` and `mesh`, then the other sections.

    `names` are those of dims that the model leaves without one, by input and place; `outputs` lines of that section;
    `free` dims that are not declared, for then they may be 0. `ports`: what it says of inputs, outputs and training.
    """

    head: tuple[str, ...]
    ranks: tuple[str, ...]
    sections: tuple[str, ...]
    names: Mapping[tuple[str, int], str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    ports: Ports = Ports()


def starting_plan(
    model: ir.Model,
    paths: Mapping[ir.Node, str],
    name: str,
    symbols: Mapping[str, Symbol] | None = None,
    proposal: Proposed | None = None,
    ranks: int = 1,
    because: Mapping[str, str] | None = None,
) -> str:
    """The text of a plan for the model called `name`; `paths` has the dotted path of every node of the main graph.

    `symbols` are what the model itself promises of its dims: the plan would win over them, so it repeats them. `proposal` is
    what is proposed in place of the examples, `ranks` the number of ranks that the model's own placement needs. `because`: why a symbol
    has its least size.
    """
    from partc.compiler.training.shared import parameter_sizes

    graph = model.graph
    if proposal is not None and not proposal.ports.listed:
        inputs = _inputs(graph, symbols or {}, proposal, because or {}) if proposal.ports.stated else ()
        return "\n".join([*proposal.ranks, *inputs, *proposal.sections, *proposal.outputs]) + "\n"
    sizes = [stored_bytes(value) for value in graph.initializers.values()]
    elements = parameter_sizes(model, paths)
    parameters = f"{count(len(elements), 'parameter')} of {count(sum(elements), 'element')}"
    counts = f"{count(len(graph), 'node')}, {parameters}, {size_text(sum(sizes))}"
    chosen = proposal or _examples_of(graph, paths, ranks)
    lines = [
        f"# A plan for {_shown(name)}: {counts}.",
        *chosen.head,
        "",
        *chosen.ranks,
        "",
        *(_inputs(graph, symbols or {}, chosen, because or {}) if chosen.ports.stated else ()),
        *chosen.sections,
        "",
        *(_outputs_and_training(model, paths, chosen) if chosen.ports.stated else ()),
        *_tree(graph, paths, sum(sizes)),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _outputs_and_training(model: ir.Model, paths: Mapping[ir.Node, str], chosen: Proposed) -> Iterator[str]:
    graph = model.graph
    yield from chosen.outputs or _OUTPUTS
    yield from (f"#   {key(literal_pattern(value.name or ''))}: 0   # {_type(value)}" for value in graph.outputs)
    yield ""
    if chosen.ports.trains:
        return
    yield f"# train:   # with this the plan compiles to training; `partc train --data data.npz` then needs {_fed(graph)}"
    lines = [loss_line(graph), "optimizer: {type: adamw, lr: 0.001}", "batch: 32", *_shared(model, paths)]
    yield from (f"#   {line}" for line in lines)
    yield ""


def _examples_of(graph: ir.Graph, paths: Mapping[ir.Node, str], ranks: int) -> Proposed:
    """The ranks, and lines to fill in."""
    return Proposed(
        (
            "# Set 'ranks', then place modules or nodes on them under 'placement', and shard them under 'sharding';",
            "# or let `partc plan --tp 2`, `--dp 2`, `--stages 2` propose it.",
        ),
        (f"ranks: {ranks}",),
        (
            "placement:",
            "  # a name or a pattern from below, and its rank; the last match wins; for example:",
            *(f"  # {key(literal_pattern(path))}: 0" for path in _examples(paths.values())),
            "",
            "# mesh: {dp: 2, tp: 4}   # names for the axes of the ranks; without it, only numbers of shards",
            "# sharding:   # by pattern: colwise, rowwise, replicate, or the number of shards of each dim of each input; null: derived",
            *(f"#   {line}" for line in _strategies(graph, paths)),
            "# dataset: full_batch   # how inputs arrive: full_batch is replicated; or data_parallel; or by input, {x: [8, 1]}",
        ),
    )


def _fed(graph: ir.Graph) -> str:
    """Lists as text the names in a training's data: the model's inputs, and labels where the loss is not the model's own."""
    names = [_shown(name_of(value)) for value in graph.inputs]
    if not is_loss(graph):
        names.append("label")
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + "".join(names[-1:]) or "no input"


def is_loss(graph: ir.Graph) -> bool:
    """Whether the first output is one number."""
    return bool(graph.outputs) and graph.outputs[0].shape is not None and graph.outputs[0].shape.rank() == 0


def loss_line(graph: ir.Graph) -> str:
    """`loss:` of the first output, which is itself the loss where it is one number."""
    name = key(name_of(graph.outputs[0])) if graph.outputs else "logits"
    if is_loss(graph):
        return f"loss: {name}"
    return f"loss: {{type: softmax_cross_entropy, logits: {name}, labels: label}}"


def _shared(model: ir.Model, paths: Mapping[ir.Node, str]) -> Iterator[str]:
    """Comment lines of shared weights with what partc does to them; the entries in them do the opposite."""
    from partc.compiler.training.shared import shared_weights
    from partc.compiler.training.trainable import trainable_names

    found = shared_weights(model, trainable_names(model), paths)
    yield from ["parameters:"] if found else []
    for one in found:
        yield f"  {key(one.name)}: {{shared: {str(one.repeats).lower()}}}   # {one.text(one.repeats)}"


def _inputs(
    graph: ir.Graph, symbols: Mapping[str, Symbol], chosen: Proposed, because: Mapping[str, str]
) -> Iterator[str]:
    names, free = chosen.names, chosen.free
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    places: dict[str, list[tuple[ir.Value, int]]] = {}
    for value in inputs:
        for k, dim in enumerate(value.shape or ()):
            name = names.get((name_of(value), k)) or str(dim_name(value, k))
            if not isinstance(dim, int) and name.isidentifier():
                places.setdefault(name, []).append((value, k))
    if places:
        head = "symbols:   # the legal sizes of dynamic dims, for example {min: 8, max: 512, divisor: 8}"
        yield head if {*places} - {*free} else f"# {head}"
        for name, uses in places.items():
            if name in free:
                yield f"  # {key(name)}: undeclared, it may be 0: a cache is empty before the first step"
                continue
            yield f"  {key(name)}: {_promises(symbols.get(name), len(uses) > 1)}{_origin(uses, because.get(name, ''))}"
        yield ""
    if inputs:
        yield "inputs:"
    for value in inputs:
        if value.shape is None or not isinstance(value.type, ir.TensorType | None):
            yield f"  # {key(value.name or '')}: {_type(value)}"
        else:
            dims = ", ".join(names.get((name_of(value), k)) or _dim(value, k) for k in range(len(value.shape)))
            yield f"  {key(value.name or '')}: [{dims}]   # {_type(value)}"
    if inputs:
        yield ""


def _promises(symbol: Symbol | None, shared: bool) -> str:
    """The declared facts of a dim as a plan spells them; a dim that is used twice is one size."""
    given = dataclasses.asdict(symbol) if symbol is not None else {}
    default = dataclasses.asdict(Symbol())
    said = {key: value for key, value in given.items() if value != default[key]} | ({"unique": True} if shared else {})
    return f"{{{', '.join(f'{key}: {str(value).lower()}' for key, value in said.items())}}}"


def _examples(paths: Iterable[str]) -> list[str]:
    """The first and the last of the outermost modules, or nodes."""
    heads = list(dict.fromkeys(path.partition(".")[0] or path for path in paths))
    return heads[:1] + heads[1:][-1:]


def _strategies(graph: ir.Graph, paths: Mapping[ir.Node, str]) -> Iterator[str]:
    """A style for the first module or node, and for the first product with a matrix its contracted dims cut in two."""
    for path in _examples(paths.values())[:1]:
        yield f"{key(literal_pattern(path))}: colwise"
    for node in graph:
        shapes = [value.shape for value in node.inputs[:2] if value is not None and value.shape is not None]
        if node.op_type not in ("MatMul", "Gemm") or len(shapes) < 2 or len(shapes[0]) < 2 or len(shapes[1]) != 2:
            continue
        left = [*[1] * (len(shapes[0]) - 1), 2]
        left = left[::-1] if node.attributes.get_int("transA", 0) else left
        right = [1, 2] if node.attributes.get_int("transB", 0) else [2, 1]
        cuts = [str(left), str(right), *["null"] * (len(node.inputs) - 2)]
        yield f"{key(literal_pattern(paths[node]))}: {{in: [{', '.join(cuts)}]}}"
        return


def _tree(graph: ir.Graph, paths: Mapping[ir.Node, str], total: int) -> Iterator[str]:
    root = _Part("")
    loose: list[tuple[str, ir.Node, list[ir.Value]]] = []
    used: set[str] = set()
    for node in graph:
        parameters = [value for value in _initializers(node, graph) if value.name not in used]
        used.update(name_of(value) for value in parameters)
        path = paths[node]
        modules = path.split(".")[:-1]
        if not modules or not all(modules):
            loose.append((path, node, parameters))
            continue
        part = root
        for i, module in enumerate(modules):
            part = part.inside.setdefault(module, _Part(module, ".".join(modules[: i + 1])))
            part.add(node, parameters)
        part.parameters += parameters
    if root.inside:
        yield "# The modules of the model, with their nodes, weights and op types:"
        yield "#"
        for part in root.inside.values():
            yield from _module(part, 0, total)
        yield "#"
    if loose:
        yield from _loose(loose, total)
    unused = len(graph.initializers) - len(used)
    if unused:
        yield f"# No node uses {count(unused, 'weight')} of the model, not listed here."


def _module(part: _Part, depth: int, total: int) -> Iterator[str]:
    yield _line("  " * depth + key(literal_pattern(part.path)), part, total)
    listed = [value for value in part.parameters if not _is_arithmetic(value)]
    for value in listed:
        label = name_of(value).removeprefix(part.path + ".")
        yield f"#   {'  ' * depth}  . {_shown(label)}  {_type(value)}  {size_text(stored_bytes(value))}"
    for inner in part.inside.values():
        yield from _module(inner, depth + 1, total)


def _loose(nodes: list[tuple[str, ir.Node, list[ir.Value]]], total: int) -> Iterator[str]:
    """The nodes that are in no module: one line each, or, of more than MOST_LINES, one line for each run."""
    length = 1 if len(nodes) <= MOST_LINES else -(-len(nodes) // RUNS)
    runs = "" if length == 1 else f", {len(nodes)} of them, in runs of {length} in the order of the graph"
    yield f"# The nodes outside of modules{runs}:"
    yield "#"
    for start in range(0, len(nodes), length):
        run = nodes[start : start + length]
        ends = [key(literal_pattern(path)) for path, _, _ in (run[0], run[-1])]
        part = _Part(ends[0] if len(run) == 1 else " .. ".join(ends))
        for _, node, parameters in run:
            part.add(node, parameters)
            part.parameters += [value for value in parameters if not _is_arithmetic(value)]
        yield _line(part.label, part, total, alone=len(run) == 1)
        if length == 1:
            yield from (
                f"#       . {_shown(v.name or '')}  {_type(v)}  {size_text(stored_bytes(v))}" for v in part.parameters
            )
    yield "#"


def _line(label: str, part: _Part, total: int, alone: bool = False) -> str:
    kinds = [f"{op} {n}" if n > 1 else op for op, n in part.ops.most_common(4)]
    more = f", and {len(part.ops) - 4} more" if len(part.ops) > 4 else ""
    share = f"{100 * part.bytes / total:5.1f} %" if total and part.bytes else " " * 7
    nodes = "" if alone else count(part.nodes, "node")
    weights = size_text(part.bytes) if part.bytes else ""
    return f"#   {label:<{WIDEST}} {nodes:>11} {weights:>10} {share}  {', '.join(kinds)}{more}"


def _initializers(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Value]:
    """The initializers that a node uses, itself or in its bodies, each once, in order."""
    seen: set[str] = set()
    for inner in nodes_of([node]):
        for value in inner.inputs:
            name = value.name if value is not None else None
            if value is not None and name and name not in seen and graph.initializers.get(name) is value:
                seen.add(name)
                yield value


def _is_arithmetic(value: ir.Value) -> bool:
    """Whether an initializer is a scalar or a short list of integers (a shape, axes): counted, but not listed."""
    shape = value.shape
    if shape is None or any(not isinstance(dim, int) for dim in shape):
        return False
    return len(shape) == 0 or (len(shape) == 1 and value.dtype == ir.DataType.INT64 and shape.numpy()[0] <= 8)


def _type(value: ir.Value) -> str:
    kind = value.type
    if kind is not None and not isinstance(kind, ir.TensorType):
        return _shown(str(kind))
    dtype = "unknown type"
    if value.dtype is not None:
        dtype = {"FLOAT": "float32", "DOUBLE": "float64"}.get(value.dtype.name, value.dtype.name.lower())
    if value.shape is None:
        return f"{dtype}, rank unknown"
    return f"{dtype} [{', '.join('?' if _name(dim) is None else _shown(str(_name(dim))) for dim in value.shape)}]"


def _name(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _dim(value: ir.Value, axis: int) -> str:
    name = dim_name(value, axis)
    return str(name) if isinstance(name, int) else key(name) if is_dim_name(name) else "null"


def _origin(uses: Sequence[tuple[ir.Value, int]], because: str) -> str:
    """A comment that says which dims a symbol is, where the model gives them no name, and why it has its least size."""
    unnamed = [f"dim {k} of '{_shown(name_of(value))}'" for value, k in uses if _name((value.shape or ())[k]) is None]
    words = [f"{', '.join(unnamed)}, which the model does not name"] if unnamed else []
    words += [_shown(because)] if because else []
    return f"   # {'; '.join(words)}" if words else ""


def key(text: str) -> str:
    """The text as YAML, with quotes where it needs them."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return re.sub(r"[^\x20-\x7e]", _escaped, json.dumps(text, ensure_ascii=False))


def _shown(text: str) -> str:
    """The text for a comment: on one line, printable."""
    return re.sub(r"[^\x20-\x7e]", lambda found: found[0] if found[0].isprintable() else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\U{ord(found[0]):08x}"
