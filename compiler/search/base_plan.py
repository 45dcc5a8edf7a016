"""The parts of an existing plan that a search copies unchanged: its training, precision, messages, symbols and dims of inputs.

What it says of ranks, placement, sharding, how inputs arrive and outputs leave, and of a pipeline, is what is searched; but whether
statistics of a batch may be of each microbatch is taken over.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.plan.document import read_text
from partc.compiler.plan.precision import MessageRules
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.rules import Plan
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.proposal.edited_plan import with_optimizer
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode

_TAKEN = ("batch_dims", "precision", "train")
_WRITTEN = ("messages",)
_MERGED = ("inputs", "symbols")
_SEARCHED = (
    "dataset",
    "experts",
    "mesh",
    "outputs",
    "parameters",
    "pipeline",
    "placement",
    "ranks",
    "sharding",
    "stored",
)


@dataclass(frozen=True)
class Base:
    """The sections by name; of a training its batch, None where it is not stated, its optimizer, a bucket's bytes."""

    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    batch: int | None = None
    optimizer: Optimizer | None = None
    bucket: int = 0
    is_sharded: bool = False
    statistics: bool = False
    """Whether statistics of a batch may be of each microbatch."""
    messages: MessageRules | None = None

    @property
    def keeps_rest(self) -> bool:
        """Whether ranks keep what rounding leaves of gradients."""
        gradients = self.messages.gradients if self.messages is not None else None
        return gradients is not None and gradients.keep_rest

    def written(self, zero: bool, routes: bool) -> tuple[str, ...]:
        """The lines of the sections; of `zero` with an optimizer that is sharded over the axis dp.

        `routes`: whether rows are sent to experts; without it nothing is said of these.
        """
        lines = []
        forms = {} if self.messages is None else self.messages.model_dump(exclude_none=True)
        if written := {name: form for name, form in forms.items() if routes or name != "rows"}:
            lines += [f"messages: {json.dumps(written)}", ""]
        for name, section in self.sections.items():
            text = with_optimizer(section, "shard: dp") if zero and name == "train" else section
            lines += [*text.splitlines(), ""]
        return tuple(lines)

    @property
    def trains(self) -> bool:
        return "train" in self.sections


def base_of(path: Path, source: Source) -> tuple[Base, Source]:
    """What is taken over, and the model with the plan's symbols and dims; CompileError where the plan has what a search does not know."""
    text = read_text(path)
    plan = parse_plan(text, str(path))
    root = YAML(typ="rt", pure=True).compose(text)
    if not isinstance(root, MappingNode) or root.flow_style:
        raise CompileError(
            Problem(str(path), "the plan is one flow mapping", help="write each section on lines of its own")
        )
    starts = [(str(key.value), key.start_mark) for key, _ in root.value]
    others = [(name, mark) for name, mark in starts if name not in (*_TAKEN, *_WRITTEN, *_MERGED, *_SEARCHED)]
    if others:
        known = ", ".join((*_TAKEN, *_WRITTEN, *_MERGED))
        raise CompileError(
            [
                Problem(f"{path}:{mark.line + 1}", f"a search does not take '{name}' over", help=f"it takes {known}")
                for name, mark in others
            ]
        )
    if dropping := next((rule for rule in plan.experts if rule.capacity is not None), None):
        raise CompileError(
            Problem(dropping.where, "a search does not take a capacity of experts over", help="leave out 'capacity'")
        )
    ends = [*(mark.index for _, mark in starts[1:]), len(text)]
    sections = {
        name: _without_remarks(text[mark.index : end])
        for (name, mark), end in zip(starts, ends, strict=True)
        if name in _TAKEN
    }
    train = plan.train
    base = Base(
        sections,
        None if train is None else train.batch,
        None if train is None else train.optimizer,
        0 if train is None else train.bucket_bytes,
        train is not None and bool(train.optimizer.shard),
        plan.pipeline is not None and plan.pipeline.statistics is not None,
        plan.messages,
    )
    return base, _with_dims(source, plan)


def _without_remarks(section: str) -> str:
    """A section without the comments behind it, which are of the next one."""
    lines = section.rstrip().splitlines()
    while lines and (not lines[-1].strip() or lines[-1].startswith("#")):
        lines.pop()
    return "\n".join(lines)


def _with_dims(source: Source, plan: Plan) -> Source:
    """The model with the plan's names and sizes of dims, and its promises of symbols."""
    model = source.model.clone()
    for value in model.graph.inputs:
        rule = plan.dims.inputs.get(value.name or "")
        if rule is not None and value.shape is not None and len(value.shape) == len(rule.dims):
            value.shape = ir.Shape(
                [own if given is None else given for own, given in zip(value.shape, rule.dims, strict=True)]
            )
    symbols = {**source.declared.symbols, **{name: rule.symbol for name, rule in plan.dims.symbols.items()}}
    return dataclasses.replace(source, model=model, declared=dataclasses.replace(source.declared, symbols=symbols))
