"""How a gradient is proven: against central differences in float64, in float32, and on the shards of every legal cut.

The law of a cut: cotangents come in as the dual of the outputs' placements, dual(Shard) = Shard, dual(Replicate) = Partial,
dual(Partial) = Replicate, and the gradient of the local nodes gives those of the inputs as the duals of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_shape_inference
import onnxruntime
from double_ops import IMPRECISE, STAND_INS
from onnx.reference import ReferenceEvaluator
from partc.compiler.autodiff.engine import Backward, differentiate_nodes
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Local, Rule
from rule_case import Array, Case, case, node_of
from rule_prover import _claims, _shard, _terms, divides, local_of, text_of

DOUBLE = {np.dtype("float32"): np.dtype("float64"), np.dtype("float64"): np.dtype("float64")}


@dataclass(frozen=True)
class Proof:
    """A case whose gradient is proven for the inputs `wanted`, from cotangents of the outputs `seeds`.

    `cuts`: whether the gradient is also run on the shards of every cut. `close`: the tolerance of float32.
    `fixed`: by input, the dims that stay numbers where the others are dynamic.
    """

    case: Case
    wanted: tuple[int, ...]
    seeds: tuple[int, ...]
    cuts: bool
    close: float
    fixed: Mapping[int, tuple[int, ...]]

    def __str__(self) -> str:
        return str(self.case)


def proof(
    op_type: str,
    operands: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    wanted: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    cuts: bool = True,
    close: float = 2e-4,
    fixed: Mapping[int, tuple[int, ...]] | None = None,
    **options: Any,
) -> Proof:
    """A proof of the gradient of a case (see `rule_case.case`); all inputs that are numbers with a fraction are wanted."""
    this = case(op_type, operands, attributes, **options)
    floats = [
        k
        for k, one in enumerate(this.operands)
        if one is not None and k not in this.constants and (not isinstance(one, np.ndarray) or one.dtype.kind == "f")
    ]
    return Proof(this, tuple(floats if wanted is None else wanted), tuple(seeds), cuts, close, fixed or {})


def faults(this: Proof, dynamic: bool) -> list[str]:
    """What is wrong with the gradient of the whole node: empty where it is right."""
    feeds = numbers(this)
    node = in_double(node_in(this, dynamic, feeds))
    outputs = [f"y{k}" for k in this.seeds]
    want = evaluate([node], feeds, {}, outputs)
    rng = np.random.default_rng(3)
    seeds = {f"y{k}.dy": rng.uniform(-1, 1, want[f"y{k}"].shape) for k in this.seeds}
    _, found = gradients(this, [node], feeds, {}, seeds)
    wrong = []
    for k in this.wanted:
        name = f"x{k}"
        if found[name].shape != feeds[name].shape or found[name].dtype != feeds[name].dtype:
            wrong.append(f"{name}: {found[name].dtype}{found[name].shape}, not {feeds[name].dtype}{feeds[name].shape}")
            continue
        slope = _slope(node, feeds, name, rng.uniform(-1, 1, feeds[name].shape), seeds, outputs)
        given = float((found[name] * slope[0]).sum())
        scale = max(abs(slope[1]), float(np.abs(found[name] * slope[0]).sum()) * 1e-2, 1e-3)
        if abs(given - slope[1]) > 2e-6 * scale:
            wrong.append(f"{name}: the slope is {slope[1]:.9g}, the gradient's {given:.9g}")
    inputs = {name: _single(array) for name, array in (feeds | seeds).items()}
    plain = node_in(this, dynamic, feeds)
    try:
        _, made = gradients(
            this, [plain], {name: inputs[name] for name in feeds}, {}, {n: inputs[n] for n in seeds}, single=True
        )
    except Exception as error:
        return [*wrong, f"in float32: {str(error).splitlines()[0]}"]
    for k in this.wanted:
        have, exact = made[f"x{k}"], found[f"x{k}"]
        largest = float(np.abs(exact).max(initial=1e-3))
        if have.dtype != np.float32 or not np.allclose(have, exact, rtol=this.close, atol=this.close * largest):
            wrong.append(f"x{k} in float32 differs by {np.abs(have - exact).max():.3g} of {largest:.3g}")
    return wrong


def cut_faults(this: Proof, dynamic: bool = False) -> list[str]:
    """What is wrong with the gradients of the local nodes under every cut that the op's rule allows, into 3 or else into 2."""
    feeds = numbers(this)
    plain = node_in(this, dynamic, feeds)
    rule, node = rule_of(plain), in_double(plain)
    want = evaluate([node], feeds, {}, [f"y{k}" for k in range(this.case.outputs)])
    rng = np.random.default_rng(5)
    seeds = {f"y{k}.dy": rng.uniform(-1, 1, want[f"y{k}"].shape) for k in this.seeds}
    _, whole = gradients(this, [node], feeds, {}, seeds)
    wrong = []
    legal = [
        (cut, terms)
        for cut, terms in _claims(rule)
        if len(cut) + (terms is not None) == 1 and divides(rule, cut, feeds, list(want.values()))
    ]
    most = {
        cut[0][0] if cut else terms and terms[0]: (cut, terms) for cut, terms in legal
    }  # the last is the largest number
    for cut, terms in most.values():
        if cut and rule.reduce.get(cut[0][0]) in ("max", "min"):
            continue
        said = f"{cut or terms} by {text_of(rule)}"
        try:
            found = _cut(this, node, rule, cut, terms, feeds, seeds)
        except Exception as error:
            wrong.append(f"{said}: {type(error).__name__} {str(error).splitlines()[0]}")
            continue
        for name, parts in found.items():
            k = int(name[1:])
            letters = rule.inputs[k] or ""
            letter = cut[0][0] if cut else ""
            if letter and letter in letters:
                together = [np.concatenate(parts, axis=letters.index(letter))]
            elif terms and k in terms[0]:
                together = parts
            else:
                together = [sum(parts[1:], parts[0])]
            for one in together:
                if one.shape != whole[name].shape or not np.allclose(one, whole[name], rtol=1e-6, atol=1e-7):
                    wrong.append(f"{said}: {name} is not the dual of its placement")
                    break
    return wrong


def _cut(
    this: Proof,
    node: ir.Node,
    rule: Rule,
    cut: tuple[tuple[str, int], ...],
    terms: tuple[tuple[int, ...], int] | None,
    feeds: Mapping[str, Array],
    seeds: Mapping[str, Array],
) -> dict[str, list[Array]]:
    """The input cotangents of every rank."""
    rng = np.random.default_rng(9)
    letter, count = cut[0] if cut else ("", terms[1] if terms else 1)
    split = {f"x{k}": _terms(rng, feeds[f"x{k}"], count, 2.0) for k in (terms[0] if terms else ())}
    spread: dict[str, list[Array]] = {}
    for name, dy in seeds.items():
        letters = rule.outputs[int(name[1 : name.index(".")])] or ""
        if letter and letter in letters:
            spread[name] = [_shard(dy, letters, dict(cut), {letter: at}) for at in range(count)]
        elif terms or rule.reduce.get(letter) == "sum":
            spread[name] = [dy] * count
        else:
            spread[name] = _terms(rng, dy, count, 2.0)
    found: dict[str, list[Array]] = {}
    known: dict[object, Backward] = {}
    for at in range(count):
        shards, shard = dict(cut), ({letter: at} if letter else {})
        own = {
            name: _shard(split[name][at] if name in split else array, rule.inputs[int(name[1:])], shards, shard)
            for name, array in feeds.items()
        }
        local = local_of(node, rule, shards, shard)
        (rule.local or Local.same)(local)
        shapes = dict(local.local_shapes)
        own_seeds = {name: parts[at] for name, parts in spread.items()}
        _, made = gradients(this, local.nodes, own, local.constants, own_seeds, shapes, node, known=known)
        for name, dx in made.items():
            if dx.shape != own[name].shape:
                raise ValueError(f"{name}'s gradient is {dx.shape}, the shard {own[name].shape}")
            found.setdefault(name, []).append(dx)
    return found


def gradients(
    this: Proof,
    nodes: Sequence[ir.Node],
    feeds: Mapping[str, Array],
    constants: Mapping[str, Array],
    seeds: Mapping[str, Array],
    shapes: Mapping[str, Any] | None = None,
    of: ir.Node | None = None,
    single: bool = False,
    known: dict[object, Backward] | None = None,
) -> tuple[Backward, dict[str, Array]]:
    """The gradients of the wanted inputs by name, zeros where none flows; and what made them.

    `known`: what was made for other ranks of the cut; one whose nodes, constants and shapes are the same has it, too.
    """
    wanted = [f"x{k}" for k in this.wanted]
    values = [] if of is None else [value for value in (*of.inputs, *of.outputs) if value is not None]
    cotangents = {name.removesuffix(".dy"): name for name in seeds}
    known = {} if known is None else known
    key = (
        *(ir.serde.serialize_node(node).SerializeToString() for node in nodes),
        *((name, array.dtype.str, array.shape, array.tobytes()) for name, array in constants.items()),
        *(shapes or {}).items(),
    )
    if key not in known:
        known[key] = differentiate_nodes(nodes, cotangents, wanted, values=values, shapes=shapes, constants=constants)
    backward = known[key]
    every = [*backward.forward, *backward.early, *backward.nodes]
    held = {**constants, **backward.constants}
    made = evaluate(every, {**feeds, **seeds}, held, list(backward.gradients.values()), fallback=not single)
    found = {name: made[dx] for name, dx in backward.gradients.items()}
    return backward, {name: found.get(name, np.zeros_like(feeds[name])) for name in wanted}


def node_in(this: Proof, dynamic: bool, feeds: Mapping[str, Array]) -> ir.Node:
    """The case's node in float32, with static or dynamic dims."""
    node = node_of(this.case, dynamic, {name: _single(array) for name, array in feeds.items()})
    if dynamic and this.fixed and node.graph is not None:
        for k, dims in this.fixed.items():
            value = node.inputs[k]
            assert value is not None
            shape = list(value.shape or ())
            for dim in dims:
                shape[dim] = feeds[f"x{k}"].shape[dim]
            value.shape = ir.Shape(shape)
        for value in node.outputs:
            value.shape = None
        onnx_shape_inference.infer_symbolic_shapes(ir.Model(node.graph, ir_version=10), warn_on_missing=False)
    return node


def numbers(this: Proof) -> dict[str, Array]:
    """The operands' numbers in float64, away from the kinks of functions by chance."""
    rng = np.random.default_rng(100 + len(str(this)))
    found: dict[str, Array] = {}
    for k, one in enumerate(this.case.operands):
        if isinstance(one, np.ndarray):
            found[f"x{k}"] = one.astype(DOUBLE.get(one.dtype, one.dtype))
        elif one is not None:
            found[f"x{k}"] = np.asarray(rng.uniform(*(this.case.span or (-2, 2)), one)).astype(np.float32).astype(float)
    return found


def in_double(node: ir.Node) -> ir.Node:
    """The node's values as those of float64."""
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.DOUBLE)
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float64))
    return node


def evaluate(
    nodes: Sequence[ir.Node],
    feeds: Mapping[str, Array],
    constants: Mapping[str, Array],
    outputs: Sequence[str],
    fallback: bool = True,
) -> dict[str, Array]:
    """What nodes make, by onnxruntime; where it has no kernel for a type, node by node and there by the standard's reference."""
    protos = [ir.serde.serialize_node(node) for node in nodes]
    for proto in protos:
        proto.name = ""
    if not fallback or not any(proto.op_type in IMPRECISE for proto in protos):
        try:
            return _session(protos, feeds, constants, outputs)
        except Exception:
            if not fallback:
                raise
    have = {**feeds, **constants}
    for proto in protos:
        given = {name: have[name] for name in proto.input if name}
        made = [name for name in proto.output if name]
        try:
            if proto.op_type in IMPRECISE:
                raise NotImplementedError
            have |= _session([proto], given, {}, made)
        except Exception:
            have |= dict(zip(made, _by_reference(proto, given, made), strict=True))
    return {name: np.asarray(have[name]) for name in outputs}


def _by_reference(proto: onnx.NodeProto, given: Mapping[str, Array], made: Sequence[str]) -> Sequence[Array]:
    """The outputs of one node by the standard's reference, or by numpy where that lacks the op or is in single precision."""
    attributes = {attr.name: onnx.helper.get_attribute_value(attr) for attr in proto.attribute}
    if proto.op_type in STAND_INS:
        return [STAND_INS[proto.op_type](attributes, *(given[name] for name in proto.input))]
    return list(ReferenceEvaluator(_model([proto], given, {}, made)).run(None, given))


_sessions: dict[bytes, Any] = {}


def _session(
    protos: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], constants: Mapping[str, Array], outputs: Sequence[str]
) -> dict[str, Array]:
    used = {name for proto in protos for name in proto.input} | {name for name in outputs if name in feeds}
    given = {name: array for name, array in feeds.items() if name in used}
    model = _model(protos, given, {n: a for n, a in constants.items() if n in used}, outputs).SerializeToString()
    if model not in _sessions:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        _sessions[model] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return dict(zip(outputs, _sessions[model].run(list(outputs), given), strict=True))


def _model(
    protos: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], constants: Mapping[str, Array], outputs: Sequence[str]
) -> onnx.ModelProto:
    of = onnx.helper.np_dtype_to_tensor_dtype
    graph = onnx.helper.make_graph(
        list(protos),
        "gradient",
        [onnx.helper.make_tensor_value_info(name, of(array.dtype), None) for name, array in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    newer = {"RMSNormalization", "Attention", "RotaryEmbedding"} & {proto.op_type for proto in protos}
    opsets = [onnx.helper.make_opsetid("", 23 if newer else 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _slope(
    node: ir.Node,
    feeds: Mapping[str, Array],
    name: str,
    direction: Array,
    seeds: Mapping[str, Array],
    outputs: Sequence[str],
) -> tuple[Array, float]:
    """A direction of an input, and the derivative of the weighted outputs along it."""
    step = 1e-5
    ends = []
    for sign in (1, -1):
        made = evaluate([node], {**feeds, name: feeds[name] + sign * step * direction}, {}, outputs)
        ends.append(sum(float((made[one] * seeds[f"{one}.dy"]).sum()) for one in outputs))
    return direction, (ends[0] - ends[1]) / (2 * step)


def _single(array: Array) -> Array:
    return np.asarray(array.astype(np.float32)) if array.dtype == np.float64 else array


def placements(proofs: Sequence[Proof]) -> Iterator[tuple[Proof, bool]]:
    """Every proof with static dims, and those with dynamic dims."""
    for one, dynamic in itertools.product(proofs, (False, True)):
        if not (dynamic and one.case.static):
            yield one, dynamic
