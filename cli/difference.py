"""Compares two artifacts: the facts of their programs, the changes between these, and the thresholds of a review.

Facts are the ranks of nodes, their shardings, the communication and its cost. They are read from the manifest and from one rank file of
each kind. Equal changes of names that differ in numbers become one row: `layers.*.mlp.in.MatMul`, 48 times. A threshold is `bytes>5%`,
`memory>100MB`, `messages>0` or `placement>0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from onnx import ModelProto
from partc.cli.job.inputs import choose_sizes
from partc.cli.output.stats import moved
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.cost.step import simulated
from partc.runtime.artifact.format import BYTES, CUT, DOMAIN, PATH, RULE, TAG, TARGET, Collective, Transfer
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tensors.dtypes import element
from partc.runtime.errors import UsageError
from partc.runtime.units import parse_bytes, seconds

MEASURES = {
    "messages": "messages and collectives of a step",
    "bytes": "bytes that all ranks send in a step",
    "memory": "peak memory of the largest rank",
    "weights": "weights of the largest rank, without the optimizer's state",
    "time": "time of a step on the machine",
}
"""Maps the name of each measure of a program to its description; the time, in nanoseconds, is measured where a machine is given."""
TIME = "time"
IN_BYTES = ("bytes", "memory", "weights")
_CUT = re.compile(r"(?:^|, |; )(\S+ in \d+) by ")


@dataclass(frozen=True)
class Fact:
    """One fact as a text to compare, with its reason."""

    text: str
    why: str = ""


@dataclass
class Facts:
    """A program's facts by kind and name, and its measures at chosen sizes. `unknown`: the values that `bytes` and `memory` leave out."""

    placement: dict[str, Fact] = field(default_factory=dict)
    layouts: dict[str, Fact] = field(default_factory=dict)
    shards: dict[str, Fact] = field(default_factory=dict)
    communication: dict[str, Fact] = field(default_factory=dict)
    measures: dict[str, int] = field(default_factory=dict)
    unknown: int = 0


KINDS = ("placement", "layouts", "shards", "communication")
"""The fields of `Facts` that map names to facts."""


def facts_of(artifact: Artifact, sizes: Mapping[str, int], machine: Machine | None = None) -> Facts:
    """Returns the facts of the artifact's program; with a `machine`, also the simulated time of a step.

    Raises UsageError where a dim is not a whole number at the sizes.
    """
    from onnx import TensorProto

    manifest, facts = artifact.manifest, Facts()
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
        facts.placement[path] = Fact(text, why[path])
        facts.layouts[path] = Fact(", ".join(sorted(cuts[path])) or "whole", why[path])
    for name, by_shape in shapes.items():
        facts.shards[name] = Fact("; ".join(f"{shape} on {ranks_text(ranks)}" for shape, ranks in by_shape.items()))
    _add_communication(facts, artifact, sizes)
    sent = [moved([one.bytes for one in manifest.messages], sizes)]
    sent += [moved([text] * times, sizes) for text, times in collectives]
    memory = memory_of_ranks(artifact, sizes)
    facts.measures = {
        "messages": len(manifest.messages) + len(manifest.collectives),
        "bytes": sum(one.bytes for one in sent),
        "memory": max(one.peak for one in memory),
        "weights": max(sum(target.weights + target.parameters for target in one.targets) for one in memory),
    }
    if machine is not None:
        own = {name: size for name, size in sizes.items() if name in manifest.symbols}
        facts.measures[TIME] = round(1e9 * simulated(artifact, machine, own).played.seconds)
    facts.unknown = sum(one.unknown for one in sent) + sum(one.unknown for one in memory)
    return facts


def _nodes(model: ModelProto) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yields path, target, shardings and placement rule of each compute node that has a path."""
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    for node in nodes:
        said = {entry.key: entry.value for entry in node.metadata_props}
        if node.domain != DOMAIN and (path := said.get(PATH)):
            yield path, said.get(TARGET, ""), tuple(_CUT.findall(said.get(CUT, ""))), said.get(RULE, "")


def _add_communication(facts: Facts, artifact: Artifact, sizes: Mapping[str, int]) -> None:
    """Adds the communication by op, value and ranks: its bytes for a rank, and its cause. The bytes of several messages are summed."""
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
        facts.communication[name] = Fact("unknown" if total.unknown else f"{total.bytes:,} B", causes[name])


_NUMBER = re.compile(r"\d+")
_NONE = Fact("")


@dataclass(frozen=True)
class Change:
    """A fact that differs in the second artifact: `before` is empty where it is new, `after` where it is gone; `why` is its reason."""

    kind: str
    name: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class Measured:
    """One measure of both artifacts."""

    name: str
    before: int
    after: int

    @property
    def grown(self) -> int:
        """The second artifact's value minus the first one's."""
        return self.after - self.before

    @property
    def percent(self) -> float:
        """The growth in percent of the first artifact's value; infinite where that is 0."""
        return 0.0 if not self.grown else 100 * self.grown / self.before if self.before else float("inf")


@dataclass(frozen=True)
class Difference:
    """The differences of two programs of one name; a program that one artifact lacks has no facts there."""

    program: str
    changes: tuple[Change, ...]
    measures: tuple[Measured, ...]

    def of(self, kind: str) -> list[Change]:
        """The changes of a kind."""
        return [one for one in self.changes if one.kind == kind]


def difference(program: str, first: Facts, second: Facts) -> Difference:
    """Returns every fact that differs between the programs or that one of them lacks, in the programs' order, and their measures."""
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
    """Groups changes whose names and reasons differ only in numbers into one, with `*` in place of these.

    Returns each with the number of changes that it stands for.
    """
    rows: dict[tuple[str, str, str], list[Change]] = {}
    for one in changes:
        rows.setdefault((_NUMBER.sub("*", one.name), one.before, one.after), []).append(one)
    return [(some[0] if len(some) == 1 else _merged(some), len(some)) for some in rows.values()]


def _merged(some: Sequence[Change]) -> Change:
    """Merges several changes into one: numbers that differ in their names or reasons become `*`."""
    name, why = (_starred([getattr(one, key) for one in some]) for key in ("name", "why"))
    return Change(some[0].kind, name, some[0].before, some[0].after, why)


def _starred(texts: Sequence[str]) -> str:
    """Returns a text with `*` for each number in which the texts differ; the first text where they differ in more than numbers."""
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
    """The most growth of a measure, with `percent` in percent of the first artifact's value; or the most changed facts of a kind."""

    text: str
    name: str
    most: float
    percent: bool = False

    def exceeded(self, found: Difference) -> str:
        """Returns a sentence on how far a difference exceeds the threshold; empty where it does not."""
        if self.name in KINDS:
            number = len(found.of(self.name))
            return f"{self.text}: {number:,} changed" if number > self.most else ""
        one = next(one for one in found.measures if one.name == self.name)
        grown = one.percent if self.percent else one.grown
        shown = (seconds(size / 1e9) if self.name == TIME else f"{size:,}" for size in (one.before, one.after))
        return f"{self.text}: {' became '.join(shown)}, {one.percent:+.3g} %" if grown > self.most else ""


def parse_threshold(text: str) -> Threshold:
    """Reads a threshold from its text. Raises ValueError with the problem."""
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
    """Returns a sentence for each exceeded threshold in any program, with the program's name where there are several."""
    return [
        f"{one.program}: {text}" if len(found) > 1 else text
        for one in found
        for threshold in thresholds
        if (text := threshold.exceeded(one))
    ]


def common_sizes(old: Artifact, new: Artifact, given: Mapping[str, int]) -> dict[str, int]:
    """Returns the requested sizes, with the first artifact's typical ones for the rest. Raises UsageError where an artifact forbids one."""
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
    """Returns the differences of the programs of each name, and the number of values of unknown size."""
    by_program, unknown = [], 0
    for name in dict.fromkeys([*old.programs, *new.programs]):
        facts = [
            facts_of(one.program_named(name), sizes, machine) if name in one.programs else Facts() for one in (old, new)
        ]
        by_program.append(difference(name, *facts))
        unknown += max(one.unknown for one in facts)
    return by_program, unknown
