"""The op table: which ops have an entry, and the rule of one node.

An entry is registered where its op is described. What it says of itself, for `partc ops` and for readers, is the first paragraph
of its docstring: factors, what is contracted, what stays whole, remarks.

    @op("MatMul")
    def matmul(node: ir.Node) -> Rule | None:
        \"\"\"`*mk,*kn->*mn`; k contracted.\"\"\"

    op("Det", factors="*..->*", says="the matrix whole")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partc.compiler.autodiff.engine import is_differentiable, stops_gradient
from partc.compiler.ops.notation import rule, whole_rule
from partc.compiler.ops.rule import OWN, Rule, RuleOf

if TYPE_CHECKING:
    import onnx_ir as ir
    from partc.compiler.ops.local import Local

CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class Entry:
    """One op's row: its rule, and in words its factors, its contracted letters, what stays whole, and remarks."""

    domain: str
    op_type: str
    rule: RuleOf
    factors: str
    contracted: str = ""
    whole: str = ""
    remarks: str = ""

    @property
    def name(self) -> str:
        """The op's name, with its domain where that is not the standard's."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def cuttable(self) -> bool:
        """Whether any factor of the op may be cut."""
        return any(sign == "*" or (sign.isalpha() and sign not in self.whole) for sign in self.factors)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows back through the op."""
        return is_differentiable(self.domain, self.op_type)

    @property
    def stops(self) -> bool:
        """Whether the op is known to let no gradient through, as a comparison does; else it has merely no rule."""
        return stops_gradient(self.domain, self.op_type)

    def __str__(self) -> str:
        words = [
            self.factors or "whole",
            *([f"contracted: {self.contracted}"] if self.contracted else []),
            *([f"whole: {self.whole}"] if self.whole else []),
            *([self.remarks] if self.remarks else []),
        ]
        return f"{self.name}: {'; '.join(words)}"


_TABLE: dict[tuple[str, str], Entry] = {}


def op(
    *op_types: str,
    domain: str = "",
    factors: str = "",
    contracted: Mapping[str, str] | None = None,
    whole: str = "",
    linear: str = "",
    terms: Sequence[int] | None = None,
    local: Callable[[Local], None] | None = None,
    says: str = "",
) -> Callable[[RuleOf], RuleOf]:
    """Registers ops: the decorated rule of a node, or with `factors` (the notation of `notation.py`) this very row.

    `says` is what follows the factors in the op's line.
    """
    if factors:

        def by_factors(node: ir.Node) -> Rule | None:
            return rule(node, factors, contracted=contracted, whole=whole, linear=linear, terms=terms, local=local)

        _register(op_types, domain, by_factors, f"`{factors}`{'; ' if says else ''}{says}")

    def decorate(rule_of_node: RuleOf) -> RuleOf:
        doc = (rule_of_node.__doc__ or "").strip().split("\n\n")[0]
        _register(op_types, domain, rule_of_node, " ".join(doc.split()))
        return rule_of_node

    return decorate


def uncut(*op_types: str, domain: str = "", why: str) -> None:
    """Registers ops of which nothing is cut, and the reason."""
    _register(op_types, domain, whole_rule, why)


def entries() -> tuple[Entry, ...]:
    """All entries: the standard's ops by name, then those of other domains."""
    return tuple(_TABLE[key] for key in sorted(_TABLE))


def standard_ops(opset: int = 23) -> tuple[str, ...]:
    """The names of the ops that the standard has at an opset version."""
    import onnx.defs

    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        older = newest.get(schema.name)
        if schema.domain == "" and (older.since_version if older else 0) < schema.since_version <= opset:
            newest[schema.name] = schema
    return tuple(sorted(name for name, schema in newest.items() if not schema.deprecated))


def rule_of(node: ir.Node) -> Rule:
    """The rule of a node; nothing is cut where its op has no entry or the shape of an operand is unknown."""
    entry = _TABLE.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    operands = [*node.inputs, *(value for value in node.outputs if value.name)]
    unknown = any(value is not None and value.shape is None for value in operands)
    if entry is None or (unknown and entry.domain != OWN):
        return whole_rule(node)
    return entry.rule(node) or whole_rule(node)


def _register(op_types: Sequence[str], domain: str, rule_of_node: RuleOf, line: str) -> None:
    for op_type in op_types:
        if (domain, op_type) in _TABLE:
            raise ValueError(f"the op table has two entries for {op_type}")
        _TABLE[domain, op_type] = Entry(domain, op_type, rule_of_node, **_read(line))


def _read(line: str) -> dict[str, str]:
    """The parts of an entry's line, which semicolons separate.

    `factors` in backticks, `k contracted` or `k contracted by max`, `n whole`, and remarks.
    """
    found = {"factors": "", "contracted": "", "whole": ""}
    remarks = []
    for clause in (part.strip().rstrip(".") for part in line.split(";")):
        contracted = re.fullmatch(r"(\w+) contracted( by \w+)?", clause)
        if clause.startswith("`") and not found["factors"]:
            found["factors"] = clause.strip("`")
        elif contracted:
            found["contracted"] = contracted[1] + (contracted[2] or "")
        elif clause.endswith(" whole") and not re.search(" (are|is|stays?) ", clause):
            found["whole"] = clause.removesuffix(" whole")
        elif clause:
            remarks.append(clause)
    return {**found, "remarks": "; ".join(remarks)}
