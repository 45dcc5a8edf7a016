"""Builds the graph of an onnxscript module: its forward is called once with the op builder and symbolic inputs.

Before the call parameters are named by their attribute path (`layers.0.up.weight`, the root's own name left out), and their values are
removed during the call, so that no weight is drawn or read while the graph is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import onnxscript.nn
from onnxscript import GraphBuilder
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.names import derive_names
from partc.compiler.frontend.onnx_file import checked
from partc.compiler.ir.graph import graphs_of
from partc.compiler.nn.parameter import Parameter

# The newest opset of which the stock onnxruntime runs every op that the layers of `nn` use.
OPSET = 23
IR_VERSION = 11


def trace(module: onnxscript.nn.Module, inputs: Sequence[Spec], outputs: Sequence[str], where: str) -> ir.Model:
    """Returns the module's model; `outputs` names the results of forward, or is empty.

    Raises CompileError for parameters without values, weights that no attribute of a module has, and outputs that cannot be named;
    exceptions of forward itself are passed on.
    """
    parameters = _parameters(module, where)
    values = {spec.name: ir.val(spec.name, spec.dtype, list(spec.dims)) for spec in inputs}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": OPSET}, name=type(module).__name__)
    builder = GraphBuilder(graph)
    contents = {path: parameter.const_value for path, parameter in parameters.items()}
    for path, parameter in parameters.items():
        parameter.name, parameter.const_value = path, None
        graph.initializers[path] = parameter
        parameter._realized = True
    object.__setattr__(module, "_name", None)
    try:
        if type(module).forward is onnxscript.nn.Sequential.forward:
            result = module(builder.op, *values.values())
        else:
            result = module(builder.op, **values)
    finally:
        for path, parameter in parameters.items():
            parameter.const_value = contents[path]
    _add_outputs(builder, _named_outputs(result, outputs, where), where)
    _refuse_strangers(graph, parameters, where)
    for path, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[path]
    _refuse_without_values(graph, where)
    _drop_absent_inputs(graph)
    model = ir.Model(graph, ir_version=IR_VERSION, functions=list(builder.functions.values()))
    model = checked(model, where)
    derive_names(model, [value for name, value in graph.initializers.items() if name not in parameters])
    return model


def module_paths(root: onnxscript.nn.Module) -> Iterator[tuple[str, onnxscript.nn.Module]]:
    """Yields every module below the root, with the path of its nodes; a module that occurs twice has the first path."""
    seen: set[int] = {id(root)}

    def below(module: onnxscript.nn.Module, base: str) -> Iterator[tuple[str, onnxscript.nn.Module]]:
        for key, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = ".".join(part for part in (base, child.name or key) if part)
            yield path, child
            # A list is never called itself: its children's names hold the list's.
            is_list = isinstance(child, onnxscript.nn.ModuleList) and not isinstance(child, onnxscript.nn.Sequential)
            yield from below(child, base if is_list else path)

    yield "", root
    yield from below(root, "")


def _parameters(root: onnxscript.nn.Module, where: str) -> dict[str, onnxscript.nn.Parameter]:
    by_name: dict[str, onnxscript.nn.Parameter] = {}
    seen: set[int] = set()
    problems: list[Problem] = []
    for path, module in module_paths(root):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            whole = f"{path}.{name}" if path else name
            if whole in by_name:
                problems.append(
                    Problem(where, f"two parameters have the path '{whole}'", help="rename one of their modules")
                )
            if isinstance(parameter, Parameter):
                parameter.path = whole
            by_name[whole] = parameter
    if problems:
        raise CompileError(problems)
    return by_name


def _named_outputs(result: object, names: Sequence[str], where: str) -> dict[str, ir.Value]:
    """Maps names to the results of forward: the declared names, else a dict's keys, else `output` or `output_0`, `output_1`."""
    match result:
        case ir.Value():
            outputs = {"output": result}
        case Mapping():
            outputs = {str(name): value for name, value in result.items()}
        case tuple() | list():
            outputs = {f"output_{k}": value for k, value in enumerate(result)}
        case _:
            fact = f"forward returns {result!r}, which is not a value of the graph"
            raise CompileError(
                Problem(where, fact, help="return a value, a tuple of values, or a dict of them by name")
            )
    wrong = [name for name, value in outputs.items() if not isinstance(value, ir.Value)]
    if wrong or not outputs:
        fact = f"forward returns {outputs[wrong[0]]!r} as '{wrong[0]}'" if wrong else "forward returns no value"
        raise CompileError(Problem(where, fact, help="return a value, a tuple of values, or a dict of them by name"))
    if names and len(names) != len(outputs):
        fact = f"outputs names {len(names)} values ({', '.join(names)}), but forward returns {len(outputs)}"
        raise CompileError(Problem(where, fact, help="write one name for each value that forward returns"))
    return dict(zip(names, outputs.values(), strict=True)) if names else outputs


def _add_outputs(builder: GraphBuilder, outputs: Mapping[str, ir.Value], where: str) -> None:
    """Names the outputs; an output that is also an input, a weight or another output is copied by an Identity."""
    graph = builder.graph
    kept = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    if clash := [name for name in outputs if name in kept]:
        problems = [
            Problem(where, f"'{name}' names an output and an input or weight", help="rename one") for name in clash
        ]
        raise CompileError(problems)
    for name, value in outputs.items():
        if value.producer() is None or value in graph.outputs:
            value = builder.op.Identity(value)
        value.name = name
        graph.outputs.append(value)


def _refuse_strangers(graph: ir.Graph, parameters: Mapping[str, onnxscript.nn.Parameter], where: str) -> None:
    own = {id(parameter) for parameter in parameters.values()}
    help_ = "make modules and parameters in __init__ and keep them as attributes; lists of modules are nn.ModuleList"
    used: dict[int, tuple[ir.Value, ir.Node]] = {}
    inside = {id(value) for inner in graphs_of(graph) for value in inner.inputs}
    inside |= {id(value) for value in graph.initializers.values() if not isinstance(value, onnxscript.nn.Parameter)}
    inside |= {id(output) for inner in graphs_of(graph) for node in inner for output in node.outputs}
    for inner in graphs_of(graph):
        for node in inner:
            for value in node.inputs:
                if value is not None and id(value) not in inside and id(value) not in own:
                    used.setdefault(id(value), (value, node))
    problems = []
    for value, node in used.values():
        kind = "the parameter" if isinstance(value, onnxscript.nn.Parameter) else "the value"
        shape = list(value.shape) if value.shape is not None else "of unknown shape"
        fact = f"{kind} '{value.name}' {shape}, which {node.op_type} uses, belongs to no module of the model"
        problems.append(Problem(where, fact, help=help_))
    if problems:
        raise CompileError(problems)


def _drop_absent_inputs(graph: ir.Graph) -> None:
    """Removes absent inputs at the end of a node's list, such as a missing bias."""
    for inner in graphs_of(graph):
        for node in inner:
            count = len(node.inputs)
            while count and node.inputs[count - 1] is None:
                count -= 1
            if count < len(node.inputs):
                node.resize_inputs(count)


def _refuse_without_values(graph: ir.Graph, where: str) -> None:
    help_ = "pass data= or init=, such as nn.Parameter(shape, init=nn.init.normal(0.02))"
    problems = [
        Problem(where, f"the parameter '{name}' {list(value.shape or ())} has no values", help=help_)
        for name, value in graph.initializers.items()
        if value.const_value is None
    ]
    if problems:
        raise CompileError(problems)
