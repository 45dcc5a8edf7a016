"""The texts of rank programs in the dumps: ops with the types that values have there, communication with its cause, bodies of tasks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.emit.choice_text import cut_text, strategies
from partc.compiler.emit.helper_types import HelperTypes, helper_type_text
from partc.compiler.emit.node_text import node_text
from partc.compiler.emit.shard_text import part_of
from partc.compiler.emit.value_text import value_text
from partc.compiler.ir.drawn import law_of
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    Constant,
    CopyOp,
    LocalTensor,
    RankConstant,
    RankOp,
    RankProgram,
    TaskBody,
    TaskCall,
)
from partc.compiler.ir.value_bytes import bytes_text
from partc.compiler.ir.value_info import Shape
from partc.runtime.artifact.law import law_text


class RankTexts:
    """The texts of a program's rank programs; the lines of an op that several ranks have with the same types are written once."""

    def __init__(self, program: Program, helpers: HelperTypes | None = None) -> None:
        self.program = program
        self.helpers = helpers or HelperTypes(program)
        self._ops: dict[Hashable, list[str]] = {}
        self._values: dict[tuple[ir.Value, Shape | None], str] = {}

    def of(self, part: RankProgram, ranks: Sequence[int]) -> str:
        """A program as the dumps show it, of the ranks that share it."""
        return "\n".join(self._lines(part, ranks))

    def _lines(self, part: RankProgram, ranks: Sequence[int]) -> Iterator[str]:
        kinds = _Kinds(self, part, None)
        yield f"program @rank_{part.rank:04d}({', '.join(f'%{held.name}' for held in part.inputs)}) {{"
        yield from (self._weight_line(part, held, ranks) for held in part.weights)
        for one in part.kept:
            after = f"   next: %{one.next}" if one.next else ""
            on = f"   on: {one.target}" if one.target else ""
            yield f"  # State: %{one.name} : {kinds[one.name]}{part_of(self.program, one.version, ranks)}{after}{on}"
        if part.scalars:
            yield f"  # Scalars: {', '.join(f'%{name}' for name in part.scalars)}"
        for step in part.steps:
            yield from self._step_lines(part, step, kinds)
        yield from _return_lines([held.name for held in part.outputs], kinds)
        for body in part.bodies:
            inside, inner = _Kinds(self, part, body), replace(part, types=body.types)
            yield ""
            yield f"task @{body.name}({', '.join(f'%{name}' for name in body.inputs)}) {{"
            for step in body.steps:
                yield from self._step_lines(inner, step, inside)
            yield from _return_lines(body.outputs, inside)

    def value(self, value: ir.Value, shape: Shape | None) -> str:
        """A value's type with its shape on a rank."""
        key = value, shape
        if key not in self._values:
            self._values[key] = value_text(self.program, value, shape)
        return self._values[key]

    def _weight_line(self, part: RankProgram, held: LocalTensor, ranks: Sequence[int]) -> str:
        """A weight, with the law of one whose numbers the artifact does not have."""
        value, shape = part.types[held.name]
        law = law_of(held.version.value)
        where = part_of(self.program, held.version, ranks if law else ranks[:1])
        initial = f"   Initial: {law_text(law)}" if law else ""
        size = f"{bytes_text(self.program.values[value], shape)} bytes{where}"
        return f"  # Parameter: %{held.name} : {self.value(value, shape)}   {size}{initial}"

    def _step_lines(self, part: RankProgram, step: RankOp, kinds: _Kinds) -> Iterator[str]:
        match step:
            case ComputeOp():
                yield from self._op_lines(part, step, kinds)
            case CommOp():
                yield from _comm_lines(self.program, step, kinds)
            case CopyOp():
                yield f"  %{step.made} = Copy(%{step.source}) {{to: {step.target}}}"
                yield f"      : {kinds.of([step.source])} -> {kinds.of([step.made])}"
                yield f"      # Scope: {step.path}   Bytes: {step.bytes}   Cause: {step.cause}"
            case TaskCall():
                outs, ins = (", ".join(f"%{name}" for name in names) for names in (step.outputs, step.inputs))
                yield f"  {outs + ' = ' if outs else ''}{step.body.name}({ins}) {{microbatch: {step.microbatch}}}"
                yield f"      # Task: {step.cell}"

    def _op_lines(self, part: RankProgram, step: ComputeOp, kinds: _Kinds) -> list[str]:
        """A node of a rank; strategy and cuts stand at the one that makes the outputs of the model's own node."""
        node, source = step.node, step.source
        outs, ins = [v.name or "" for v in node.outputs], [v.name or "" if v else "" for v in node.inputs]
        signature = f"{kinds.of(ins)} -> {kinds.of(outs)}"
        placed = self.program.placement.get(source)
        groups = tuple([group for group in placed.groups if part.rank in group]) if placed else ()
        itself = any(name in part.types and part.types[name][0] in source.outputs for name in outs)
        key = step, signature, groups, itself
        if key not in self._ops:
            target = f" {{target: {step.target}}}" if step.target else ""
            cut = "".join(strategies(self.program, source, part.rank)) if itself else ""
            again = f"   Recomputed: {step.again}" if step.again else ""
            path = self.program.paths.get(source, node.name or "")
            lines = [
                f"  {node_text(node, '  ')}{cut}{target}",
                f"      : {signature}",
                f"      # Scope: {path}" + (f"   Rule: {placed.rule}" if placed else "") + again,
            ]
            if itself:
                lines += [f"      # Sharded: {text}" for text in cut_text(self.program, source, part.rank)]
            self._ops[key] = lines
        return self._ops[key]


class _Kinds:
    """The types of a rank's values, or of those in the body of a task, by their names: `(<tensor(float), (batch, 8)>, <>)`."""

    def __init__(self, texts: RankTexts, part: RankProgram, body: TaskBody | None) -> None:
        self._of = texts
        self._part = part
        self._types = part.types if body is None else body.types
        self._texts = {name: helper_type_text(kind) for name, kind in texts.helpers.of(part, body).items()}
        self._texts |= dict.fromkeys(part.scalars, "<tensor(float), ()>")
        self._texts[""] = "<>"

    def __getitem__(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = self._text(name)
        return self._texts[name]

    def of(self, names: Sequence[str]) -> str:
        return f"({', '.join([self._texts.get(name) or self[name] for name in names])})"

    def _text(self, name: str) -> str:
        if name in self._types:
            return self._of.value(*self._types[name])
        return f"<{_constant(self._part.constants[name])}>" if name in self._part.constants else "<>"


def _return_lines(names: Sequence[str], kinds: _Kinds) -> Iterator[str]:
    yield f"  Return({', '.join(f'%{name}' for name in names)})"
    yield f"      : {kinds.of(names)}"
    yield "}"


def _comm_lines(program: Program, step: CommOp, kinds: _Kinds) -> Iterator[str]:
    outs, ins = (", ".join(f"%{name}" if name else "_" for name in names) for names in (step.outputs, step.inputs))
    attributes = ", ".join(f"{key}: {_plain(value)}" for key, value in {**step.attributes, "tag": step.tag}.items())
    yield f"  {outs + ' = ' if outs else ''}{step.op_type}({ins}) {{{attributes}}}"
    yield f"      : {kinds.of(step.inputs)} -> {kinds.of(step.outputs)}"
    producer = step.value.producer()
    path = program.paths[producer] if producer is not None else step.value.name
    yield f"      # Scope: {path}   Bytes: {step.bytes}   Cause: {step.cause}"


def _plain(value: int | str | tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _constant(constant: Constant) -> str:
    if isinstance(constant, RankConstant):
        text = f"[{', '.join(constant.items)}]" if constant.shape else constant.items[0]
        return f"{constant.dtype}, {text} in {constant.group}"
    return f"{constant.dtype}, {constant.tolist()}"
