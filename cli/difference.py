"""What differs between two artifacts: facts of their programs, the changes between these, and the thresholds of a review.

Facts say where nodes run, how they are cut, what travels and what it costs. They are read from the manifest and from one rank file of each
kind. Alike changes of numbered names become one row: `layers.*.mlp.in.MatMul`, 48 times. A threshold is `bytes>5%`, `memory>100MB`,
`messages>0` or `placement>0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from partc.cli.job.inputs import choose_sizes
from partc.cli.output.stats import moved
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.cost.step import simulated
from partc.runtime.artifact.format import BYTES, CUT, DOMAIN, PATH, RULE, TAG, TARGET
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tensors.dtypes import element
from partc.runtime.errors import UsageError
from partc.runtime.units import parse_bytes, seconds

if TYPE_CHECKING:
    from onnx import ModelProto
    from partc.compiler.cost.machine import Machine
    from partc.runtime.artifact.format import Collective, Transfer
    from partc.runtime.artifact.manifest import Artifact


MEASURES = {
    "messages": "messages and collectives of a step",
    "bytes": "bytes that all ranks send in a step",
    "memory": "peak memory of the largest rank",
    "weights": "weights of the largest rank, without the optimizer's state",
    "time": "time of a step on the machine",
}
"""By name what is measured of a program; the time, in nanoseconds, where a machine is given."""
TIME = "time"
IN_BYTES = ("bytes", "memory", "weights")
_CUT = re.compile(r"(?:^|, |; )(\S+ in \d+) by ")


@dataclass(frozen=True)
class Fact:
    """What one thing is, as text to compare, and why."""

    text: str
    why: str = ""


@dataclass
class Facts:
    """A program's facts by kind and name, and its measures at chosen sizes. `unknown`: what `bytes` and `memory` leave out."""

    placement: dict[str, Fact] = field(default_factory=dict)
    layouts: dict[str, Fact] = field(default_factory=dict)
    shards: dict[str, Fact] = field(default_factory=dict)
    communication: dict[str, Fact] = field(default_factory=dict)
    measures: dict[str, int] = field(default_factory=dict)
    unknown: int = 0


KINDS = ("placement", "layouts", "shards", "communication")
"""The fields of `Facts` that hold facts by name."""


def facts_of(artifact: Artifact, sizes: Mapping[str, int], machine: Machine | None = None) -> Facts:
    """The facts of the program that the artifact is seen from, with the time of a step that a `machine` is simulated to take.

    Raises UsageError where a dim is not a whole number at the sizes.
    """
    from onnx import TensorProto

    manifest, found = artifact.manifest, Facts()
    collectives: list[tuple[str, int]] = []
    places: dict[str, dict[str, list[int]]] = {}
    cuts: dict[str, dict[str, None]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    why: dict[str, str] = {}
    stated = {one.tag: one.bytes for one in manifest.collectives}
    for ranks in manifest.by_file(range(manifest.ranks)).values():
        model = artifact.model(ranks[0])
        for path, target, cut, rule in dict.fromkeys(_nodes(model)):
            places.setdefault(path, {}).setdefault(target, []).extend(ranks)
            cuts.setdefault(path, {}).update(dict.fromkeys(cut))
            why.setdefault(path, rule)
        for tensor in model.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            shape = f"{element(tensor.data_type)}[{', '.join(map(str, tensor.dims))}]"
            shapes.setdefault(tensor.name, {}).setdefault(shape, []).extend(ranks)
        collectives += [
            (metadata_of(node, BYTES, stated[tag]), len(ranks))
            for node in unrolled(model).graph.node
            if node.domain == DOMAIN and (tag := integer_of(node, TAG, -1)) in stated
        ]
    for path, by_target in places.items():
        text = "; ".join(
            f"{ranks_text(ranks)}{f' on {target}' * bool(target)}" for target, ranks in sorted(by_target.items())
        )
        found.placement[path] = Fact(text, why[path])
        found.layouts[path] = Fact(", ".join(sorted(cuts[path])) or "whole", why[path])
    for name, by_shape in shapes.items():
        found.shards[name] = Fact("; ".join(f"{shape} on {ranks_text(ranks)}" for shape, ranks in by_shape.items()))
    _add_communication(found, artifact, sizes)
    sent = [moved([one.bytes for one in manifest.messages], sizes)]
    sent += [moved([text] * times, sizes) for text, times in collectives]
    memory = memory_of_ranks(artifact, sizes)
    found.measures = {
        "messages": len(manifest.messages) + len(manifest.collectives),
        "bytes": sum(one.bytes for one in sent),
        "memory": max(one.peak for one in memory),
        "weights": max(sum(target.weights + target.parameters for target in one.targets) for one in memory),
    }
    if machine is not None:
        own = {name: size for name, size in sizes.items() if name in manifest.symbols}
        found.measures[TIME] = round(1e9 * simulated(artifact, machine, own).played.seconds)
    found.unknown = sum(one.unknown for one in sent) + sum(one.unknown for one in memory)
    return found


def _nodes(model: ModelProto) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Path, target, cuts, and the rule that placed it, for each compute node that has a path."""
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    for node in nodes:
        said = {entry.key: entry.value for entry in node.metadata_props}
        if node.domain != DOMAIN and (path := said.get(PATH)):
            yield path, said.get(TARGET, ""), tuple(_CUT.findall(said.get(CUT, ""))), said.get(RULE, "")


def _add_communication(found: Facts, artifact: Artifact, sizes: Mapping[str, int]) -> None:
    """What travels, by op, value and ends: its bytes for a rank, and the cause. What several messages move is added up."""
    manifest = artifact.manifest
    texts: dict[str, list[str]] = {}
    causes: dict[str, str] = {}
    groups = {name: " | ".join(map(ranks_text, lists)) for name, lists in manifest.groups.items()}
    named: list[tuple[str, Transfer | Collective]] = [
        (f"message {one.value}: {one.source} to {one.target}", one) for one in manifest.messages
    ]
    named += [(f"{one.op} {one.value}: {groups[one.group]}", one) for one in manifest.collectives]
    for name, one in named:
        texts.setdefault(name, []).append(one.bytes)
        causes.setdefault(name, one.cause)
    for name, some in texts.items():
        total = moved(some, sizes)
        found.communication[name] = Fact("unknown" if total.unknown else f"{total.bytes:,} B", causes[name])


_NUMBER = re.compile(r"\d+")
_NONE = Fact("")


@dataclass(frozen=True)
class Change:
    """What is otherwise in the second artifact: `before` is empty where it is new, `after` where it is gone; `why` it is so there."""

    kind: str
    name: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class Measured:
    """A measure of both artifacts."""

    name: str
    before: int
    after: int

    @property
    def grown(self) -> int:
        """How much larger it is in the second."""
        return self.after - self.before

    @property
    def percent(self) -> float:
        """The same in percent of the first; infinite where that is 0."""
        return 0.0 if not self.grown else 100 * self.grown / self.before if self.before else float("inf")


@dataclass(frozen=True)
class Difference:
    """What differs between two programs of one name; a program that one artifact lacks is one without facts."""

    program: str
    changes: tuple[Change, ...]
    measures: tuple[Measured, ...]

    def of(self, kind: str) -> list[Change]:
        """The changes of a kind."""
        return [one for one in self.changes if one.kind == kind]


def difference(program: str, first: Facts, second: Facts) -> Difference:
    """Every fact that one has and the other has not, or not so, in the order in which the programs have them."""
    changes = []
    for kind in KINDS:
        before: dict[str, Fact] = getattr(first, kind)
        after: dict[str, Fact] = getattr(second, kind)
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name, _NONE), after.get(name, _NONE)
            if old.text != new.text:
                changes.append(Change(kind, name, old.text, new.text, new.why or old.why))
    known = [name for name in MEASURES if name in first.measures or name in second.measures]
    measures = [Measured(name, first.measures.get(name, 0), second.measures.get(name, 0)) for name in known]
    return Difference(program, tuple(changes), tuple(measures))


def grouped_changes(changes: Iterable[Change]) -> list[tuple[Change, int]]:
    """The changes, those whose names and reasons differ in numbers alone as one with `*` for these, and how many each row stands for."""
    rows: dict[tuple[str, str, str], list[Change]] = {}
    for one in changes:
        rows.setdefault((_NUMBER.sub("*", one.name), one.before, one.after), []).append(one)
    return [(some[0] if len(some) == 1 else _merged(some), len(some)) for some in rows.values()]


def _merged(some: Sequence[Change]) -> Change:
    """One change for several: where the names differ there is a `*`, and so in the reasons."""
    name, why = (_starred([getattr(one, key) for one in some]) for key in ("name", "why"))
    return Change(some[0].kind, name, some[0].before, some[0].after, why)


def _starred(texts: Sequence[str]) -> str:
    """A text with `*` for each number in which the texts differ; the first one, where they differ in more than numbers."""
    if len({_NUMBER.sub("*", text) for text in texts}) > 1:
        return texts[0]
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    shown = iter([numbers[0] if len(set(numbers)) == 1 else "*" for numbers in columns])
    return _NUMBER.sub(lambda _: next(shown), texts[0])


_FORM = re.compile(r"\s*([a-z]+)\s*>\s*(\S+)\s*", re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """How much a measure may grow, with `percent` in percent of the first artifact's; or how many facts of a kind may change."""

    text: str
    name: str
    most: float
    percent: bool = False

    def exceeded(self, found: Difference) -> str:
        """By how much a difference is beyond it, as a sentence; empty where it is not."""
        if self.name in KINDS:
            number = len(found.of(self.name))
            return f"{self.text}: {number:,} changed" if number > self.most else ""
        one = next(one for one in found.measures if one.name == self.name)
        grown = one.percent if self.percent else one.grown
        shown = (seconds(size / 1e9) if self.name == TIME else f"{size:,}" for size in (one.before, one.after))
        return f"{self.text}: {' became '.join(shown)}, {one.percent:+.3g} %" if grown > self.most else ""


def parse_threshold(text: str) -> Threshold:
    """A threshold from its text; ValueError says what is wrong."""
    form = _FORM.fullmatch(text)
    known = ", ".join([*MEASURES, *KINDS])
    if form is None:
        raise ValueError(f"'{text}' is not NAME>AMOUNT, such as bytes>5%, memory>100MB or placement>0")
    name, amount = form.groups()
    if name not in MEASURES and name not in KINDS:
        raise ValueError(f"'{text}': '{name}' is not compared; these are: {known}")
    forms = ["a percentage"] if name in MEASURES else []
    if name != TIME:
        forms.append("bytes" if name in IN_BYTES else "a number")
    if name in MEASURES and (percent := _PERCENT.fullmatch(amount)):
        return Threshold(text, name, float(percent[1]), percent=True)
    if "bytes" in forms and (bytes := parse_bytes(amount)) is not None:
        return Threshold(text, name, bytes)
    if "a number" in forms and _WHOLE.fullmatch(amount):
        return Threshold(text, name, int(amount))
    raise ValueError(f"'{text}': '{amount}' is not an amount of {name}; that is {' or '.join(forms)}")


def exceeded(thresholds: Sequence[Threshold], found: Sequence[Difference]) -> list[str]:
    """What is beyond the thresholds in any program, with its name where there are several."""
    return [
        f"{one.program}: {text}" if len(found) > 1 else text
        for one in found
        for threshold in thresholds
        if (text := threshold.exceeded(one))
    ]


def common_sizes(old: Artifact, new: Artifact, given: Mapping[str, int]) -> dict[str, int]:
    """The given sizes, else the first artifact's typical ones; UsageError where either forbids one."""
    typical = {**typical_sizes(new.manifest), **typical_sizes(old.manifest)}
    problems = [f"--set {name}: neither artifact has a symbol '{name}'" for name in given if name not in typical]
    sizes = {**typical, **given}
    for artifact in (old, new):
        own = {name: size for name, size in sizes.items() if name in artifact.manifest.symbols}
        problems += [f"{artifact.folder}: {text}" for text in choose_sizes(artifact.manifest.symbols, own)[1]]
    if problems:
        raise UsageError("\n".join([*problems, "  help: --set NAME=SIZE to a size that both artifacts allow"]))
    return sizes


def differences(
    old: Artifact, new: Artifact, sizes: Mapping[str, int], machine: Machine | None = None
) -> tuple[list[Difference], int]:
    """What differs between the programs of each name, and of how many values the size is not known."""
    found, unknown = [], 0
    for name in dict.fromkeys([*old.programs, *new.programs]):
        facts = [
            facts_of(one.program_named(name), sizes, machine) if name in one.programs else Facts() for one in (old, new)
        ]
        found.append(difference(name, *facts))
        unknown += max(one.unknown for one in facts)
    return found, unknown
