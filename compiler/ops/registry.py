"""The op table: one entry an op, which holds all that the compiler knows of it.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import onnx_shape_inference
from partc.compiler.ops.notation import replicated_rule, rule
from partc.compiler.ops.rule import OWN, Local, Rule, RuleOf

if TYPE_CHECKING:
    import onnx_ir as ir

CONTRIB = "com.microsoft"
FAMILIES = "partc.compiler.ops.families"

LocalForm = Callable[[Local], None]
GradientRule = Callable[..., "str | Sequence[str | None] | None"]
BodyRule = Callable[..., "Sequence[tuple[str, str]]"]
RowRule = Callable[..., "tuple[str, str]"]
Precision: TypeAlias = Literal["low", "high", "widest", "follow"]
"""The type in which an op computes where a plan asks for 16 bits: that one, float32, its widest operand's, its first operand's."""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """What the compiler knows of one op.

    `factors`: the op's dims in the notation of `notation.py`, empty where nothing is sharded. `contracted`: per factor that no
    output has, the reduction that sharding it leaves to be done. `replicated`: factors that are never sharded. `linear`, `partial`:
    as in `Rule`. `why`: the reason why nothing is sharded. `remarks`: what attributes change. `draws`: whether a node may give
    other numbers each time it runs. `stops_gradient`: the outputs do not follow small changes of the inputs, as in a comparison.

    `precision`: in which type it computes where a plan asks for 16 bits. `host`: the inputs that kernels read on the host, whichever
    device computes: a shape, axes, a condition.

    `sharding`: the rule of one node, where `factors` alone do not say it. `local`: the node of one rank, for rules that name none.
    `gradient`: takes the cotangents of the outputs, or of the first `gradient_outputs`, and the inputs; `body_gradient` that of an op
    with bodies. `looks_up`: whether a node reads rows of its first input along its first dim, and nothing else of it;
    `row_gradient`: the gradient of that input as the ids of rows and what is added to these.
    """

    domain: str
    op_type: str
    factors: str = ""
    contracted: Mapping[str, str] = field(default_factory=dict)
    replicated: str = ""
    linear: str = ""
    partial: tuple[int, ...] | None = None
    why: str = ""
    remarks: str = ""
    draws: bool = False
    stops_gradient: bool = False
    precision: Precision = "high"
    host: tuple[int, ...] = ()
    sharding: RuleOf | None = None
    local: LocalForm | None = None
    gradient: GradientRule | None = None
    gradient_outputs: int = 0
    body_gradient: BodyRule | None = None
    looks_up: Callable[[ir.Node], bool] | None = None
    row_gradient: RowRule | None = None

    @property
    def name(self) -> str:
        """The op's name, with its domain where that is not the standard's."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def shardable(self) -> bool:
        """Whether any factor of the op may be sharded."""
        return any(sign == "*" or (sign.isalpha() and sign not in self.replicated) for sign in self.factors)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows back through the op."""
        return self.gradient is not None or self.body_gradient is not None

    def rule(self, node: ir.Node) -> Rule:
        """The rule of a node of the op; nothing is sharded where the operands have not the ranks that the op asks for."""
        if self.sharding is not None:
            found = self.sharding(node)
        elif self.factors:
            found = rule(node, self.factors, contracted=self.contracted, replicated=self.replicated)
        else:
            found = None
        if found is None:
            return replicated_rule(node)
        if found.linear is None:
            found = replace(found, linear=self.linear, partial=self.partial)
        return found if found.local is not None else replace(found, local=self.local)

    @property
    def reductions(self) -> str:
        """The contracted factors, in words: `k`, `hw by max`."""
        found = {how: "".join(k for k, v in self.contracted.items() if v == how) for how in self.contracted.values()}
        return ", ".join(letters if how in ("", "sum") else f"{letters} by {how}" for how, letters in found.items())

    def __str__(self) -> str:
        words = [
            self.factors or "replicated",
            *([f"contracted: {self.reductions}"] if self.contracted else []),
            *([f"replicated: {self.replicated}"] if self.replicated else []),
            *([f"linear {self.linearity}"] if self.linear else []),
            *([f"16 bits: {self.precision}"] if self.precision != "high" else []),
            *([f"on the host: {', '.join(map(str, self.host))}"] if self.host else []),
            *([self.why or self.remarks] if self.why or self.remarks else []),
        ]
        return f"{self.name}: {'; '.join(words)}"

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


TABLE: dict[tuple[str, str], Entry] = {}
"""By domain and op type, the domain of the standard as ""; complete once `load` has run."""


class Declared:
    """The entries that one `op(...)` declares; as decorators its methods give them their functions."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self._keys = keys

    def sharding(self, rule_of_node: Function) -> Function:
        """The rule of one node; None where nothing is sharded."""
        return self._given("sharding", rule_of_node)

    def local(self, form: Function) -> Function:
        """The node of one rank, in rules that name no local form of their own."""
        return self._given("local", form)

    def gradient(self, rule: Function) -> Function:
        """The gradient: takes the cotangent of each output (None where there is none) and the inputs, and gives one name an input."""
        return self._given("gradient", rule)

    def body_gradient(self, rule: Function) -> Function:
        """The gradient of an op with bodies; see `autodiff.engine.Bodies`."""
        return self._given("body_gradient", rule)

    def looks_up(self, is_lookup: Function) -> Function:
        """Whether a node reads its first input by rows alone."""
        return self._given("looks_up", is_lookup)

    def row_gradient(self, rule: Function) -> Function:
        """The gradient of the first input of a node that looks it up: takes the cotangent and the inputs, gives ids and rows."""
        return self._given("row_gradient", rule)

    def shapes(self, infer: Function) -> Function:
        """The inference of types and shapes, for ops that `onnx_shape_inference` does not know."""
        for domain, op_type in self._keys:
            onnx_shape_inference.registry.register(domain, op_type)(infer)
        return infer

    def _given(self, name: str, function: Function) -> Function:
        changed: dict[str, Any] = {name: function}
        for key in self._keys:
            entry = TABLE[key]
            if getattr(entry, name) is not None:
                raise ValueError(f"{entry.name} has two functions '{name}'")
            if entry.stops_gradient and name in ("gradient", "body_gradient"):
                raise ValueError(f"{entry.name} stops gradients, and has a gradient")
            TABLE[key] = replace(entry, **changed)
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
    precision: Precision = "high",
    host: Sequence[int] = (),
) -> Declared:
    """Declares ops that share an entry's fields (see `Entry`); `contracted` as letters means a sum over each."""
    if bool(factors) == bool(why):
        raise ValueError(f"{', '.join(op_types)}: an op has factors, or a reason `why` nothing is sharded")
    reductions = dict.fromkeys(contracted, "sum") if isinstance(contracted, str) else dict(contracted)
    inputs = None if partial is None else tuple(partial)
    keys = [(domain, op_type) for op_type in op_types]
    for key in keys:
        if key in TABLE:
            raise ValueError(f"the op table has two entries for {TABLE[key].name}")
        TABLE[key] = Entry(
            *key,
            factors=factors,
            contracted=reductions,
            replicated=replicated,
            linear=linear,
            partial=inputs,
            why=why,
            remarks=remarks,
            draws=draws,
            stops_gradient=stops_gradient,
            gradient_outputs=gradient_outputs,
            precision=precision,
            host=tuple(host),
        )
    return Declared(keys)


@functools.cache
def load() -> None:
    """Fills the table: imports every file of `families/`, in the order of their names."""
    package = importlib.import_module(FAMILIES)
    for name in sorted(found.name for found in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{FAMILIES}.{name}")


def entries() -> tuple[Entry, ...]:
    """All entries: the standard's ops by name, then those of other domains."""
    load()
    return tuple(TABLE[key] for key in sorted(TABLE))


def entry_of(node: ir.Node) -> Entry | None:
    """The entry of a node's op; None where there is none."""
    load()
    return TABLE.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))


def rule_of(node: ir.Node) -> Rule:
    """The rule of a node; nothing is sharded where its op has no entry or the shape of an operand is unknown."""
    entry = entry_of(node)
    operands = [*node.inputs, *(value for value in node.outputs if value.name)]
    unknown = any(value is not None and value.shape is None for value in operands)
    return replicated_rule(node) if entry is None or (unknown and entry.domain != OWN) else entry.rule(node)


def is_differentiable(node: ir.Node) -> bool:
    """Whether a gradient flows back through a node."""
    entry = entry_of(node)
    return entry is not None and entry.differentiable


def looks_up_rows(node: ir.Node) -> bool:
    """Whether a node reads rows of its first input, by ids, and its gradient can be given as ids and rows."""
    entry = entry_of(node)
    if entry is None or entry.looks_up is None or entry.row_gradient is None:
        return False
    return entry.looks_up(node)


def stops_gradient(node: ir.Node) -> bool:
    """Whether the outputs of a node are known not to follow small changes of its inputs."""
    entry = entry_of(node)
    return entry is not None and entry.stops_gradient


def host_inputs(node: ir.Node) -> tuple[int, ...]:
    """The inputs of a node that its kernel reads on the host, whichever device computes."""
    entry = entry_of(node)
    return entry.host if entry is not None else ()


def draws(node: ir.Node) -> bool:
    """Whether a node may give other numbers each time it runs."""
    entry = entry_of(node)
    return entry is not None and entry.draws


def standard_ops(opset: int = 23) -> tuple[str, ...]:
    """The names of the ops that the standard has at an opset version."""
    import onnx.defs

    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        older = newest.get(schema.name)
        if schema.domain == "" and (older.since_version if older else 0) < schema.since_version <= opset:
            newest[schema.name] = schema
    return tuple(sorted(name for name, schema in newest.items() if not schema.deprecated))
