"""A machine as a YAML file, which `partc measure` writes: every number with its unit, so that one may also be written by hand.

machine: 1
cores: 2
targets:
  cpu:
    session: 8.1us
    step: 160us
    products: {matmul: {65.5 kFLOP: 9us, 33.6 MFLOP: 1.1ms}, convolution: {...}}
    kernels: {elementwise: {4KiB: 1.2us, 16MiB: 4.1ms}, function: {...}}
    ranks: 2
    alone: {session: 8us, step: 150us, products: {...}, kernels: {...}}
links:
  - {name: default, ranks: 2, stride: 1, overlap: 0.3, wake: 9us, send: {1KiB: 21us}, all_reduce: {1KiB: 28us, 4MiB: 4ms},
     reduce_scatter: {...}, all_gather: {...}, all_to_all: {...}}
segments: {5f0c2a91: 1.31ms}

`ranks` and `alone` may be left out together: the figures then hold however many ranks of a host work. With them the figures of the target
are what each of so many ranks takes, and those of `alone` what one takes whose host has no other: the same keys and curves, none slower.
A collective's amounts are the bytes that each rank gives. The last three may be left out: they then take their share of an AllReduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.compiler.cost.machine import FALLBACK, MATMUL, Curve, Link, Machine, Processor
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.document import Document, parse_document
from partc.runtime.artifact.format import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from partc.runtime.errors import reason_of
from partc.runtime.files.counted import SCHEDULE_BYTES, read_text
from partc.runtime.units import (
    DURATIONS,
    FORMS,
    OPERATIONS,
    operations_text,
    parse_bytes,
    parse_duration,
    parse_operations,
    seconds,
    size_text,
)

FORMAT = 1
_FIGURES = ("session", "step", "products", "kernels")
_SPLIT = {"reduce_scatter": REDUCE_SCATTER, "all_gather": ALL_GATHER, "all_to_all": ALL_TO_ALL}
"""The collectives of a link that may be left out, by their keys."""
_EQUAL = 1e-9
"""The share by which equal times may differ, for what curves compute between points."""
_HELP = "`partc measure -o machine.yaml` writes one"


def read_machine(path: Path) -> Machine:
    """The machine in a file; CompileError with every mistake at once, each with its line."""
    try:
        text = read_text(path, SCHEDULE_BYTES)
    except UnicodeDecodeError as error:
        raise CompileError(Problem(str(path), f"is not UTF-8 text: {error}", help=_HELP)) from None
    except OSError as error:
        fact = reason_of(error)
        raise CompileError(Problem(str(path), f"the machine file cannot be read: {fact}", help=_HELP)) from None
    document = parse_document(text, str(path))
    reading = _Reading(document, [*document.problems])
    if not isinstance(document.data, dict):
        raise CompileError([*reading.problems, Problem(f"{path}:1", "a machine file is a mapping", help=_HELP)])
    found = reading.machine(document.data, str(path))
    if reading.problems or found is None:
        raise CompileError(reading.problems)
    return found


class _Reading:
    """Reads what is there, and collects what is wrong."""

    def __init__(self, document: Document, problems: list[Problem]) -> None:
        self.document, self.problems = document, problems

    def machine(self, data: Mapping[str, Any], where: str) -> Machine | None:
        if data.get("machine") != FORMAT:
            self.wrong((), f"'machine' is {data.get('machine')!r}, this partc reads {FORMAT}", _HELP)
        self.unknown(data, (), ("machine", "cores", "targets", "links", "segments"))
        targets = self.mapping(data, (), "targets")
        processors = {name: self.processor(self.mapping(targets, ("targets",), name), name) for name in targets}
        links = data.get("links")
        if not isinstance(links, list) or not links:
            self.wrong(("links",), "'links' is not a list of what connects ranks", _HELP)
            links = []
        if not processors and isinstance(data.get("targets"), dict):
            self.wrong(("targets",), "'targets' has no target", _HELP)
        connections = [self.link(one, k) for k, one in enumerate(links)]
        segments = self.mapping(data, (), "segments") if "segments" in data else {}
        times = {str(name): self.duration(segments, ("segments",), name) for name in segments}
        cores = self.number(data, (), "cores", int)
        return None if self.problems else Machine(where, int(cores), processors, connections, times)

    def processor(self, data: Mapping[str, Any], name: str) -> Processor:
        steps, at_once = ("targets", name), {"alone", "ranks"}
        processor = self.figures(data, steps, (*_FIGURES, *sorted(at_once)))
        if not at_once & {*data}:
            return processor
        if (ranks := self.number(data, steps, "ranks", int)) in (0, 1) and "ranks" in data:
            self.wrong(
                (*steps, "ranks"),
                f"'ranks' is {ranks:g}",
                "say how many ranks work at the same time, which 'alone' is not",
            )
        alone = self.figures(self.mapping(data, steps, "alone"), (*steps, "alone"), _FIGURES)
        if not self.problems:
            self.no_slower(alone, processor, (*steps, "alone"))
        return replace(processor, alone=alone, ranks=int(ranks))

    def figures(self, data: Mapping[str, Any], steps: tuple[str, ...], known: tuple[str, ...]) -> Processor:
        """The speeds of a target at some number of ranks."""
        self.unknown(data, steps, known)
        products, kernels = self.mapping(data, steps, "products"), self.mapping(data, steps, "kernels")
        for wanted, some, key in ((MATMUL, products, "products"), (FALLBACK, kernels, "kernels")):
            if some and wanted not in some:
                self.wrong((*steps, key), f"'{key}' has no '{wanted}', which stands for others", _HELP)
        return Processor(
            self.duration(data, steps, "session"),
            self.duration(data, steps, "step"),
            {one: self.curve(products, (*steps, "products"), one, parse_operations, OPERATIONS) for one in products},
            {one: self.curve(kernels, (*steps, "kernels"), one, parse_bytes, FORMS) for one in kernels},
        )

    def no_slower(self, alone: Processor, together: Processor, steps: tuple[str, ...]) -> None:
        """A rank that works alone is as fast as one of many in all that these have."""
        help = "write no more than the figure of the target itself, which is that of ranks that work at the same time"
        for key in ("session", "step"):
            own, other = getattr(alone, key), getattr(together, key)
            if own > other:
                self.wrong((*steps, key), f"'{key}' is {seconds(own)}, beside other ranks {seconds(other)}", help)
        tables = {"products": (alone.products, together.products), "kernels": (alone.kernels, together.kernels)}
        for key, (curves, others) in tables.items():
            if {*curves} != {*others}:
                fact = f"'{key}' are {', '.join(curves)}, and of the target {', '.join(others)}"
                self.wrong((*steps, key), fact, "write the same ones")
                continue
            shown = operations_text if key == "products" else size_text
            for name, curve in curves.items():
                points = sorted({amount for some in (curve, others[name]) for amount, _ in some.points})
                slow = next((at for at in points if curve(at) > others[name](at) * (1 + _EQUAL)), None)
                if slow is not None:
                    fact = f"'{name}' at {shown(slow)} is {seconds(curve(slow))}, beside other ranks"
                    self.wrong((*steps, key, name), f"{fact} {seconds(others[name](slow))}", help)

    def link(self, data: Any, k: int) -> Link:
        steps = ("links", k)
        if not isinstance(data, dict):
            self.wrong(steps, f"a link is a mapping, but this is {data!r}", _HELP)
            data = {}
        self.unknown(data, steps, ("name", "ranks", "stride", "overlap", "wake", "send", "all_reduce", *_SPLIT))
        overlap = self.number(data, steps, "overlap", float)
        if overlap > 1:
            self.wrong((*steps, "overlap"), f"'overlap' is {overlap:g}", "it is a share, from 0 to 1")
        if (ranks := self.number(data, steps, "ranks", int)) == 1:
            self.wrong((*steps, "ranks"), "'ranks' is 1", "measure among at least 2 ranks")
        send, reduced = (self.curve(data, steps, name, parse_bytes, FORMS) for name in ("send", "all_reduce"))
        split = {op: self.curve(data, steps, key, parse_bytes, FORMS) for key, op in _SPLIT.items() if key in data}
        stride = self.number(data, steps, "stride", int)
        wake = self.duration(data, steps, "wake")
        return Link(str(data.get("name", "")), int(ranks), int(stride), overlap, wake, send, reduced, split)

    def curve(
        self,
        data: Mapping[str, Any],
        steps: tuple[str | int, ...],
        name: str,
        parse: Callable[[str], float | None],
        forms: str,
    ) -> Curve:
        points, place = self.mapping(data, steps, name), (*steps, name)
        points_by_amount = dict[float, float]()
        for text in points:
            amount = parse(str(text)) if any(letter.isalpha() for letter in str(text)) else None
            if not amount:
                self.wrong((*place, text), f"'{text}' is not an amount", f"write {forms}, with its unit and above 0")
            points_by_amount[amount or 1.0] = self.duration(points, place, text) or 1e-12
        if not points and isinstance(data.get(name), dict):
            self.wrong(place, f"'{name}' has no point", _HELP)
        return Curve(tuple(sorted(points_by_amount.items())) or ((1.0, 1e-12),))

    def duration(self, data: Mapping[str, Any], steps: tuple[str | int, ...], name: str) -> float:
        text = data.get(name)
        duration = parse_duration(text) if isinstance(text, str) and text[-1:] == "s" else None
        if duration is None:
            is_number = isinstance(text, int | float) and not isinstance(text, bool)
            fact = f"'{name}' is missing" if text is None else f"'{name}' is {text!r}"
            fact += ", which is negative" if str(text).startswith("-") else ", without a unit" if is_number else ""
            self.wrong((*steps, name), fact, f"write {DURATIONS}")
        return duration or 0.0

    def number(self, data: Mapping[str, Any], steps: tuple[str | int, ...], name: str, kind: type) -> float:
        number = data.get(name)
        allowed = (int, float) if kind is float else int
        if isinstance(number, bool) or not isinstance(number, allowed) or not 0 <= number < float("inf"):
            fact = f"'{name}' is missing" if number is None else f"'{name}' is {number!r}"
            self.wrong((*steps, name), fact, f"write a {'whole ' if kind is int else ''}number of at least 0")
            return 0.0
        return number

    def mapping(self, data: Mapping[str, Any], steps: tuple[str | int, ...], name: str) -> Mapping[str, Any]:
        found = data.get(name)
        if not isinstance(found, dict):
            fact = f"'{name}' is missing" if found is None else f"'{name}' is {found!r}, not a mapping"
            self.wrong((*steps, name), fact, _HELP)
            return {}
        return found

    def unknown(self, data: Mapping[str, Any], steps: tuple[str | int, ...], known: tuple[str, ...]) -> None:
        for name in data:
            if name not in known:
                self.wrong((*steps, name), f"'{name}' is not a key here", f"the keys are {', '.join(known)}")

    def wrong(self, steps: tuple[str | int, ...], fact: str, help: str) -> None:
        self.problems.append(Problem(self.document.where(*steps), fact, help=help))


def machine_text(machine: Machine) -> str:
    """The file of a machine: `read_machine` gives it again, with three digits of each number."""
    return "\n".join([*_lines(machine), ""])


def _lines(machine: Machine) -> Iterator[str]:
    yield f"machine: {FORMAT}"
    yield f"cores: {machine.cores}    # shared by the ranks of a host; 0 where each rank has a device of its own"
    yield "targets:"
    for name, processor in machine.processors.items():
        yield f"  {name}:"
        yield from (f"    {line}" for line in _figures(processor))
        if processor.alone is not None:
            yield f"    ranks: {processor.ranks}    # so many of a host work at the same time, and take that; with no other a rank takes"
            yield "    alone:"
            yield from (f"      {line}" for line in _figures(processor.alone))
    yield "links:"
    for link in machine.links:
        yield f"  - name: {link.name}"
        yield f"    ranks: {link.ranks}"
        yield f"    stride: {link.stride}"
        yield f"    overlap: {link.overlap:.2f}"
        yield f"    wake: {seconds(link.wake)}"
        yield f"    send: {_curve_text(link.send, size_text)}"
        yield f"    all_reduce: {_curve_text(link.all_reduce, size_text)}"
        yield from (
            f"    {key}: {_curve_text(link.split[op], size_text)}" for key, op in _SPLIT.items() if op in link.split
        )
    if machine.segments:
        yield "segments:    # measured by themselves"
        yield from (f"  {key!r}: {seconds(time)}" for key, time in machine.segments.items())


def _figures(processor: Processor) -> Iterator[str]:
    yield f"session: {seconds(processor.session)}    # a session's run"
    yield f"step: {seconds(processor.step)}    # of a step, beside its actions"
    yield "products:    # seconds by operations of one matrix"
    yield from (f"  {key}: {_curve_text(curve, operations_text)}" for key, curve in processor.products.items())
    yield "kernels:    # seconds by bytes that a node moves"
    yield from (f"  {key}: {_curve_text(curve, size_text)}" for key, curve in processor.kernels.items())


def _curve_text(curve: Curve, amount: Callable[[float], str]) -> str:
    return "{" + ", ".join(f"{amount(one)}: {seconds(time)}" for one, time in curve.points) + "}"
