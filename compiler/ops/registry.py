"""The op table: one entry for each op, with everything that the compiler knows about it.

    matmul = op("MatMul", factors="*mk,*kn->*mn", contracted="k", linear="each")

    @matmul.sharding        # only where attributes or ranks decide: the rule of one node
    def _(node): ...

    @matmul.gradient        # dA = dY Bt, dB = At dY, in plain ops
    def _(g, dy, a, b): ...

`load` fills the table from the files of `families/`; every look-up calls it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import onnx_ir as ir
import onnx_shape_inference
from partc.compiler.ir.distinct_ranks import key_of
from partc.compiler.ir.graph import STOPS_GRADIENT
from partc.compiler.ops.notation import replicated_rule, rule
from partc.compiler.ops.rule import OWN, Local, Rule, RuleOf
from partc.compiler.ops.work import Kernel, Work
from partc.runtime.artifact.graph.kernels import host_inputs

CONTRIB = "com.microsoft"
FAMILIES = "partc.compiler.ops.families"

LocalForm = Callable[[Local], None]
GradientRule = Callable[..., "str | Sequence[str | None] | None"]
BodyRule = Callable[..., "Sequence[tuple[str, str]]"]
RowRule = Callable[..., "tuple[str, str]"]
Precision: TypeAlias = Literal["low", "high", "widest", "follow"]
"""The type in which an op computes if a plan asks for 16 bits: that type, float32, its widest operand's type, its first operand's."""
Rounding: TypeAlias = Literal["exact", "once", "sums"]
"""The rounding of an op: `exact`, it moves or selects numbers; `once`, it rounds each element to the same bits on all ranks; `sums`, the
order of a sum, or the approximation of a function, shows in the result.
"""
_MOVING = ("view", "layout", "lookup")
_EXACT = (*_MOVING, "sort")
_ELEMENTWISE = re.compile(r"\*(,\*)*(,\.\.\.)?(,_)*->\*")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Notation:
    """The correspondence of an op's dims, in the notation of `notation.py`; `factors` is empty if nothing is sharded.

    `contracted`: maps each factor that no output has to the reduction that remains after sharding it. `replicated`: factors that are never
    sharded. `linear`, `partial`: as in `Rule`. `why`: the reason for which nothing is sharded. `remarks`: the effects of attributes.
    """

    factors: str = ""
    contracted: Mapping[str, str] = field(default_factory=dict)
    replicated: str = ""
    linear: str = ""
    partial: tuple[int, ...] | None = None
    why: str = ""
    remarks: str = ""

    @property
    def shardable(self) -> bool:
        """Whether any factor of the op may be sharded."""
        return any(sign == "*" or (sign.isalpha() and sign not in self.replicated) for sign in self.factors)

    @property
    def keeps_dims(self) -> bool:
        """Whether outputs have dims of the inputs; not so for Shape, whose result has the dims as numbers."""
        given, _, made = self.factors.partition("->")
        return not self.factors or any(sign in given for sign in made if sign == "*" or sign.isalpha())

    @property
    def reductions(self) -> str:
        """The contracted factors, in words: `k`, `hw by max`."""
        found = {how: "".join(k for k, v in self.contracted.items() if v == how) for how in self.contracted.values()}
        return ", ".join(letters if how in ("", "sum") else f"{letters} by {how}" for how, letters in found.items())

    @property
    def linearity(self) -> str:
        """The inputs that may be Partial(sum), in words: `jointly`, `in each`, `in 0`, `jointly in 1, 2`."""
        if not self.linear or self.partial is None:
            return {"": "", "each": "in each", "joint": "jointly"}[self.linear]
        inputs = ", ".join(map(str, self.partial))
        return (
            f"in {inputs}"
            if len(self.partial) == 1
            else f"{'in each of' if self.linear == 'each' else 'jointly in'} {inputs}"
        )


@dataclass(frozen=True)
class Gradients:
    """The gradients of an op.

    `rule`: takes the cotangents of the outputs, or of the first `outputs`, and the inputs. `body`: the rule of an op with bodies. `rows`:
    the gradient of an input in a lookup, as the ids of rows and the rows to add. `looks_up`: whether a node reads its first input only by
    rows along the first dim. `local`: whether the op has no rule because the nodes of its local form have gradients.
    """

    rule: GradientRule | None = None
    outputs: int = 0
    body: BodyRule | None = None
    rows: RowRule | None = None
    looks_up: Callable[[ir.Node], bool] | None = None
    local: bool = False


@dataclass(frozen=True)
class Entry:
    """The compiler's facts about one op.

    `draws`: whether a node may give other numbers each time it runs. `stops_gradient`: the outputs do not follow small changes of the
    inputs, as in a comparison. `precision`: the type in which it computes if a plan asks for 16 bits. `rounds`: its rounding, if it is not
    that of its kernel. `rising`: a larger operand never makes a smaller result.

    `sharding`: returns the rule of one node, if `notation` alone does not determine it. `local`: writes the node of one rank, for rules
    that name no local form.
    """

    domain: str
    op_type: str
    notation: Notation
    draws: bool = False
    stops_gradient: bool = False
    precision: Precision = "high"
    rounds: Rounding | None = None
    rising: bool = False
    work: Work = field(default_factory=Work)
    sharding: RuleOf | None = None
    local: LocalForm | None = None
    gradients: Gradients = Gradients()

    @property
    def name(self) -> str:
        """The op's name, with its domain if it is not the standard's."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows back through the op."""
        return self.gradients.rule is not None or self.gradients.body is not None or self.gradients.local

    @property
    def is_elementwise(self) -> bool:
        """Whether an element of the output is computed from those at its place in operands that broadcast, and from scalars: `*,*,_->*`."""
        return self.work.kernel != "product" and _ELEMENTWISE.fullmatch(self.notation.factors) is not None

    @property
    def moves(self) -> bool:
        """Whether an output's elements are some of the first input's, in other places; not so if it has the input's dims as numbers."""
        own = self.notation
        return self.work.kernel in _MOVING and own.factors != "" and own.keeps_dims and self.rounding == "exact"

    @property
    def rounding(self) -> Rounding:
        """The rounding of the op: that of its kernel, unless the entry sets it."""
        if self.rounds is not None:
            return self.rounds
        extreme = {*self.notation.contracted.values()} & {"max", "min"}
        if self.work.kernel in _EXACT or extreme or self.stops_gradient:
            return "exact"
        return "once" if self.work.kernel == "elementwise" else "sums"

    def rounded(self, count: int) -> Sequence[int]:
        """Returns the inputs, of `count`, whose last bits show in the result, because they are summed or passed to a function."""
        if self.rounding != "sums":
            return ()
        whole = self.work.kernel == "elementwise" and (self.is_elementwise or not self.notation.factors)
        if whole or self.work.kernel in ("product", "convolution"):
            return range(count)
        return (2,) if self.work.kernel == "scatter" else (0,)

    def rule(self, node: ir.Node) -> Rule:
        """Returns the rule of a node of the op; it shards nothing if the operands do not have the ranks that the op requires."""
        own = self.notation
        if self.sharding is not None:
            node_rule = self.sharding(node)
        elif own.factors:
            node_rule = rule(node, own.factors, contracted=own.contracted, replicated=own.replicated)
        else:
            node_rule = None
        if node_rule is None:
            return replicated_rule(node)
        if node_rule.linear is None:
            node_rule = replace(node_rule, linear=own.linear, partial=own.partial)
        return node_rule if node_rule.local is not None else replace(node_rule, local=self.local)

    def __str__(self) -> str:
        own, on_host = self.notation, host_inputs(self.domain, self.op_type)
        words = [
            own.factors or "replicated",
            *([f"contracted: {own.reductions}"] if own.contracted else []),
            *([f"replicated: {own.replicated}"] if own.replicated else []),
            *([f"linear {own.linearity}"] if own.linear else []),
            *([f"16 bits: {self.precision}"] if self.precision != "high" else []),
            *([f"on the host: {', '.join(map(str, on_host))}"] if on_host else []),
            *([f"kernel: {self.work.kernel}"] if self.work.kernel != "elementwise" else []),
            *([own.why or own.remarks] if own.why or own.remarks else []),
        ]
        return f"{self.name}: {'; '.join(words)}"


TABLE: dict[tuple[str, str], Entry] = {}
"""Maps domain and op type to the entry; the standard domain is "". Complete once `load` has run."""


class Declared:
    """The entries that one `op(...)` declares; its methods are decorators that set the entries' functions."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self._keys = keys

    def sharding(self, rule_of_node: Function) -> Function:
        """Sets the function that returns the rule of one node, or None if nothing is sharded."""
        return self._set_field("sharding", rule_of_node)

    def local(self, form: Function) -> Function:
        """Sets the function that writes the node of one rank, for rules without a local form of their own."""
        return self._set_field("local", form)

    def gradient(self, rule: Function) -> Function:
        """Sets the gradient: a function of each output's cotangent (or None) and the inputs, which returns a name for each input."""
        return self._set_field("rule", rule, "gradients")

    def body_gradient(self, rule: Function) -> Function:
        """Sets the gradient of an op with bodies; see `autodiff.engine.Bodies`."""
        return self._set_field("body", rule, "gradients")

    def multiply_adds(self, products: Function) -> Function:
        """Sets the function that returns the number of a node's multiply-adds."""
        return self._set_field("multiply_adds", products, "work")

    def row(self, row_of: Function) -> Function:
        """Sets the function that returns the dims that one index of a node selects."""
        return self._set_field("row", row_of, "work")

    def looks_up(self, is_lookup: Function) -> Function:
        """Sets the function that says whether a node reads its first input only by rows."""
        return self._set_field("looks_up", is_lookup, "gradients")

    def row_gradient(self, rule: Function) -> Function:
        """Sets the gradient of the first input of a lookup: a function of the cotangent and the inputs, which returns ids and rows."""
        return self._set_field("rows", rule, "gradients")

    def shapes(self, infer: Function) -> Function:
        """Sets the inference of types and shapes, for ops that `onnx_shape_inference` does not know."""
        for domain, op_type in self._keys:
            onnx_shape_inference.registry.register(domain, op_type)(infer)
        return infer

    def _set_field(self, name: str, function: Function, part: Literal["", "work", "gradients"] = "") -> Function:
        """Sets a field of the entries, or of this part of them, to the function."""
        changed: dict[str, Any] = {name: function}
        for key in self._keys:
            entry = TABLE[key]
            there = getattr(entry, part) if part else entry
            if getattr(there, name) is not None:
                raise ValueError(f"{entry.name} has two functions '{name}'")
            if entry.stops_gradient and name in ("rule", "body"):
                raise ValueError(f"{entry.name} stops gradients, and has a gradient")
            own: dict[str, Any] = {part: replace(there, **changed)} if part else changed
            TABLE[key] = replace(entry, **own)
        return function


def op(
    *op_types: str,
    domain: str = "",
    factors: str = "",
    contracted: str | Mapping[str, str] = "",
    replicated: str = "",
    linear: str = "",
    partial: Sequence[int] | None = None,
    why: str = "",
    remarks: str = "",
    draws: bool = False,
    stops_gradient: bool = False,
    gradient_outputs: int = 0,
    local_gradient: bool = False,
    precision: Precision = "high",
    rounds: Rounding | None = None,
    rising: bool = False,
    kernel: Kernel = "elementwise",
    columns_of_input: bool = False,
) -> Declared:
    """Declares ops that share an entry's fields (see `Entry`, `Notation`, `Work`); `contracted` as letters means a sum over each."""
    if bool(factors) == bool(why):
        raise ValueError(f"{', '.join(op_types)}: an op has factors, or a reason `why` nothing is sharded")
    reductions = dict.fromkeys(contracted, "sum") if isinstance(contracted, str) else dict(contracted)
    inputs = None if partial is None else tuple(partial)
    notation = Notation(factors, reductions, replicated, linear, inputs, why, remarks)
    keys = [(domain, op_type) for op_type in op_types]
    for key in keys:
        if key in TABLE:
            raise ValueError(f"the op table has two entries for {TABLE[key].name}")
        TABLE[key] = Entry(
            *key,
            notation,
            draws=draws,
            stops_gradient=stops_gradient,
            precision=precision,
            rounds=rounds,
            rising=rising,
            work=Work(kernel, columns_of_input=columns_of_input),
            gradients=Gradients(outputs=gradient_outputs, local=local_gradient),
        )
    return Declared(keys)


@functools.cache
def load() -> None:
    """Fills the table: imports every file of `families/`, in the order of their names."""
    package = importlib.import_module(FAMILIES)
    for name in sorted(found.name for found in pkgutil.walk_packages(package.__path__, f"{FAMILIES}.")):
        importlib.import_module(name)


def entries() -> tuple[Entry, ...]:
    """All entries: the standard's ops by name, then those of other domains."""
    load()
    return tuple(TABLE[key] for key in sorted(TABLE))


def entry_of(node: ir.Node) -> Entry | None:
    """Returns the entry of a node's op, or None."""
    load()
    return TABLE.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))


def entry_of_op(domain: str, op_type: str) -> Entry | None:
    """Returns the entry of an op of a file, or None."""
    load()
    return TABLE.get(("" if domain == "ai.onnx" else domain, op_type))


_RULES: dict[Hashable, Rule] = {}
"""Maps nodes' keys to their rules; cleared when it has many."""
_MANY = 1 << 14


def rule_of(node: ir.Node) -> Rule:
    """Returns the rule of a node; it shards nothing if the op has no entry or the shape of an operand is unknown.

    Equal nodes share one rule object.
    """
    key = key_of(node)
    if key is None:
        return fresh_rule(node)
    if (known := _RULES.get(key)) is None:
        if len(_RULES) == _MANY:
            _RULES.clear()
        known = _RULES[key] = fresh_rule(node)
    return known


def fresh_rule(node: ir.Node) -> Rule:
    """Returns the rule of a node as `rule_of` does, computed anew."""
    entry = entry_of(node)
    operands = [*node.inputs, *(value for value in node.outputs if value.name)]
    unknown = any(value is not None and value.shape is None for value in operands)
    return replicated_rule(node) if entry is None or (unknown and entry.domain != OWN) else entry.rule(node)


def has_gradient_rule(node: ir.Node) -> bool:
    """Whether the op of a node has a gradient rule of its own, not one derived from its local form."""
    entry = entry_of(node)
    return entry is not None and entry.differentiable and not entry.gradients.local


def looks_up_rows(node: ir.Node) -> bool:
    """Whether a node looks up rows of its first input by ids, and its gradient can be expressed as ids and rows."""
    entry = entry_of(node)
    if entry is None or entry.gradients.looks_up is None or entry.gradients.rows is None:
        return False
    return entry.gradients.looks_up(node)


def stops_gradient(node: ir.Node) -> bool:
    """Whether the outputs of a node are known not to change with small changes of its inputs."""
    entry = entry_of(node)
    return entry is not None and (entry.stops_gradient or STOPS_GRADIENT in node.metadata_props)


def draws(node: ir.Node) -> bool:
    """Whether a node may give other numbers each time it runs."""
    entry = entry_of(node)
    return entry is not None and entry.draws


def standard_ops(opset: int = 23) -> tuple[str, ...]:
    """Returns the names of the standard's ops at an opset version."""
    import onnx.defs

    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        older = newest.get(schema.name)
        if schema.domain == "" and (older.since_version if older else 0) < schema.since_version <= opset:
            newest[schema.name] = schema
    return tuple(sorted(name for name, schema in newest.items() if not schema.deprecated))
