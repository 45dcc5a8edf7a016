"""Checks the other programs of an artifact: those over its state by themselves, and those inside that run parts of a batch beside it.

accumulation   a part of a batch but the last: it replaces the sums of gradients and the statistics, as a step does, and no parameter;
               it is given what a step is given, but for the optimizer's numbers, and its outputs are those of a step
totals         keeps nothing; it reads a batch as a step does, and makes for every rank what the parts are given of the whole batch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partc.runtime.artifact.format import GRADIENT, MANIFEST, TOTALS, Manifest, Port, StateRecord, stays_inside
from partc.runtime.checker.subject import Subject
from partc.runtime.checker.training.accumulation import check_accumulation
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"
_COUNTS = ("step", "part")


def check_companions(subject: Subject) -> Iterator[Violation]:
    """What is wrong with the programs inside of an artifact that trains, alone and beside the training."""
    manifest, training = subject.manifest, subject.manifest.training
    for name in subject.others if manifest.is_main else ():
        yield from subject.check_beside(name)
    if training is None:
        return
    folders = (training.accumulation, TOTALS if training.totals else "")
    for (kind, check), name in zip(_KINDS.items(), folders, strict=True):
        path = f"{name}/{MANIFEST}"
        if not name or path in subject.wrong:
            continue
        if not stays_inside(name) or path not in manifest.files:
            fact = f"its {kind} is at '{name}', where the manifest lists no artifact"
            yield Violation(MANIFEST, fact, help=_AGAIN)
            continue
        inside = subject.check_inside(subject.folder / name)
        if inside.manifest is None:
            yield from (replace(one, file=path) for one in inside.violations)
            continue
        yield from (replace(one, file=f"{name}/{one.file}") for one in inside.violations)
        if inside.manifest.training is not None:
            yield Violation(path, f"it trains, and is the {kind} of another one")
        yield from check(manifest, inside.manifest, name)
        if kind == _ACCUMULATION:
            subject.accumulation = inside
    if not training.accumulation or subject.accumulation is not None:
        yield from check_accumulation(manifest, subject.accumulation.manifest if subject.accumulation else None)


def check_part(manifest: Manifest, inner: Manifest, where: str) -> Iterator[Violation]:
    """The program of a part, in the folder `where`, changes what it must, and takes and gives what a step does."""
    yield from _check_kept(manifest, inner, where)
    replaced = {record.value for record in manifest.state if record.next and record.kind == "statistics"}
    for record in inner.state:
        wanted = record.kind == GRADIENT or record.value in replaced
        if bool(record.next) != wanted:
            fact = (
                "nothing takes its place; a part of a batch replaces every sum of gradients and the statistics"
                if wanted
                else f"'{record.next}' takes its place; a part of a batch but the last leaves it as it is"
            )
            yield Violation(f"{where}/{MANIFEST}", fact, f"state '{record.value}'", help=_AGAIN)
    scalars = manifest.training.scalars if manifest.training is not None else []
    given = {port.name: port for port in manifest.inputs if port.name not in scalars or port.name in _COUNTS}
    for port in inner.inputs:
        if port.name not in given:
            fact = "a part of a batch is not given it"
        elif not _is_within(port, given[port.name]):
            fact = f"it is {_port(port)}, and in a step {_port(given[port.name])}"
        else:
            continue
        yield Violation(f"{where}/{MANIFEST}", fact, f"input '{port.name}'", help=_AGAIN)
    guard = manifest.training.guard if manifest.training is not None else ""
    outputs, wanted_outputs = (
        {port.name: port.ranks for port in one.outputs if port.name != guard} for one in (inner, manifest)
    )
    if outputs != wanted_outputs:
        fact = f"its outputs are {_outputs(outputs)}, and those of a step {_outputs(wanted_outputs)}"
        yield Violation(f"{where}/{MANIFEST}", fact, help=_AGAIN)


def check_totals(manifest: Manifest, inner: Manifest, where: str) -> Iterator[Violation]:
    """The programs in the folder `where` read what a step reads, and make what training says that they do, wherever it is read."""
    yield from _check_kept(manifest, inner, where)
    assert manifest.training is not None
    given = {port.name: port for port in manifest.inputs}
    for port in inner.inputs:
        if port.name not in given or not _is_within(port, given[port.name]):
            fact = f"it is {_port(port)}, which the step does not read"
            yield Violation(f"{where}/{MANIFEST}", fact, f"input '{port.name}'", help=_AGAIN)
    made = {port.name: port for port in inner.outputs}
    for name in manifest.training.totals:
        if name not in made or name not in given:
            fact = "it is not made here" if name not in made else "no part of a batch reads it"
        elif not _is_within(given[name], made[name]):
            fact = f"it is {_port(made[name])}, and in a part {_port(given[name])}"
        else:
            continue
        yield Violation(f"{where}/{MANIFEST}", fact, f"total '{name}'", help=_AGAIN)


def _check_kept(manifest: Manifest, inner: Manifest, where: str) -> Iterator[Violation]:
    where = f"{where}/{MANIFEST}"
    if inner.ranks != manifest.ranks:
        yield Violation(where, f"it is for {inner.ranks} ranks, and training for {manifest.ranks}", help=_AGAIN)
    known = {(record.value, rank): record for record in manifest.state for rank in record.ranks}
    for record in inner.state:
        for rank in record.ranks:
            other = known.get((record.value, rank))
            fact = f"rank {rank} does not keep it when it trains"
            if other is not None:
                facts = [(one.tensor, one.kind, one.type, one.shape, one.box(rank)) for one in (record, other)]
                if facts[0] == facts[1]:
                    continue
                fact = f"rank {rank} keeps {_held(record, rank)}, and when it trains {_held(other, rank)}"
            yield Violation(where, fact, f"state '{record.value}'", help=_AGAIN)
            break


def _held(record: StateRecord, rank: int) -> str:
    box = record.box(rank)
    shard = "" if box is None else f", box {box}"
    kind = "" if record.kind == "parameter" else f" ({record.kind})"
    return f"'{record.tensor}'{kind} {record.type} {record.shape}{shard}"


def _is_within(port: Port, given: Port) -> bool:
    """Whether ranks that read an input get it in the way in which it is given."""
    alike = (port.type, port.shape) == (given.type, given.shape)
    return alike and all(rank in given.ranks and port.box(rank) == given.box(rank) for rank in port.ranks)


def _port(port: Port) -> str:
    return f"{port.type} {port.shape} on ranks {port.ranks}"


def _outputs(ports: dict[str, list[int]]) -> str:
    return ", ".join(f"'{name}' on ranks {ranks}" for name, ranks in ports.items()) or "none"


_ACCUMULATION = "accumulation"
_KINDS = {_ACCUMULATION: check_part, "totals": check_totals}
