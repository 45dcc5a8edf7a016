"""Checks what a manifest says of an encoder before a decoder (`artifact/generation.py`) against the inputs and caches of the programs.

programs  the one that computes it, `encode`, is there where the record is, and only there
ports     of encode the input [runs, ..], of the record's type and shape; of decode and prefill, which read entries that are meant alone,
          the count [rows], an input of integers, where the record names one
length    the room of each cache that encode writes, and where the input is counted the size of the input
tokens    those that the encoder knows have a row in each table that its input looks up; those that a decoder begins with are its own

A wrong number here is a request that is refused for no reason, or a mask that ends behind the entries of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partc.runtime.artifact.format import CACHE, Port
from partc.runtime.artifact.generation import ENCODE, EncoderRecord, GenerationRecord
from partc.runtime.artifact.graph.cache_append import entries_axis
from partc.runtime.checker.subject import Subject


def encoder_faults(subject: Subject, record: GenerationRecord, rows: int) -> Iterator[str]:
    """What is wrong with the record of an encoder by one of the programs, of which a step computes so many rows."""
    encoder, manifest = record.encoder, subject.manifest
    if manifest.is_main and (ENCODE in subject.others) != (encoder is not None):
        there = f"there is {'a' if encoder is None else 'no'} program '{ENCODE}'"
        yield f"{there}, and the generation has {'no' if encoder is None else 'an'} encoder"
    if encoder is None:
        return
    given = {port.name: port for port in manifest.inputs}
    if encoder.count and (manifest.name != ENCODE or encoder.count in given):  # an encoder may have no use for it
        yield from _input("count", encoder.count, given, "tensor(int64)", [rows])
    if manifest.is_main and encoder.count and encoder.shape != [encoder.length]:
        yield f"the encoder's input has the shape {encoder.shape}, and at most {encoder.length} entries"
    if manifest.is_main:
        for token in encoder.start:
            if not 0 <= token < record.vocabulary:
                yield f"a decoder begins with {token}, which is not a token; tokens are 0 to {record.vocabulary - 1}"
    if manifest.name == ENCODE:
        yield from _input("input", encoder.input, given, encoder.type, [rows, *encoder.shape])
        for law in given[encoder.input].ids if encoder.input in given else ():
            if encoder.vocabulary is not None and encoder.vocabulary > law.rows:
                yield f"the encoder knows {encoder.vocabulary} tokens, and its table '{law.table}' has {law.rows} rows"
        yield from _room(subject, encoder)


def _input(what: str, name: str, given: Mapping[str, Port], kind: str, shape: Sequence[int]) -> Iterator[str]:
    port = given.get(name)
    if port is None:
        yield f"the encoder's {what}: there is no input '{name}'"
    elif (port.type, port.shape) != (kind, [*shape]):
        fact = f"the encoder's {what}: the input '{name}' is {port.type}, {port.shape}"
        yield f"{fact}; it must be {kind}, [{', '.join(map(str, shape))}]"


def _room(subject: Subject, encoder: EncoderRecord) -> Iterator[str]:
    """The first of several caches of one shape is told."""
    told = set[tuple[int, ...]]()
    for one in (one for one in subject.manifest.state if one.kind == CACHE and one.next and one.ranks):
        model = subject.models.get(one.ranks[0])
        axis = entries_axis(model, one) if model is not None else None
        if axis is not None and one.shape[axis] != encoder.length and tuple(one.shape) not in told:
            told.add(tuple(one.shape))
            yield f"the cache '{one.value}' has {one.shape[axis]} entries; the encoder gives {encoder.length}"
