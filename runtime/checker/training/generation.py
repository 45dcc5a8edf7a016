"""Checks the manifest's record of generation (`artifact/generation.py`) against the inputs, outputs and caches of decode and prefill.

slots     the same number for each group of each run; a decode computes those of a group, a prefill one of each run,
          a narrow decode the number in its name
ports     tokens [rows, 1 or chunk], position [rows] and count [rows] are distinct integer inputs; next [rows] is an output, and so is
          logits [rows, vocabulary], if named; its shards on all ranks have each token of each row. With drafts scored [rows, n] is an
          input, n 1 but for the program of drafts, and these outputs have n times as many rows
caches    one row for each slot that a step computes, and room for a chunk after the last token of the longest sequence
stop      tokens of the vocabulary
states    the caches that a step replaces, and no others; then a step has one token of each sequence

A wrong number here means a write beyond the end of a cache, or a step that every rank refuses.

Also checks the manifest's record of an encoder before a decoder (`artifact/generation.py`) against the inputs and caches of the programs.

programs  the program `encode`, which computes the encoder, exists if and only if the record does
ports     encode has the input [runs, ..], of the record's type and shape; decode and prefill, which read only valid entries, have the
          count [rows], an integer input, if the record names one
length    the room of each cache that encode writes, and if the input is counted the size of the input
tokens    the encoder's tokens have a row in each table that its input looks up; the tokens with which a decoder begins are its own

A wrong number here means a request that is refused for no reason, or a mask that ends after the entries of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partc.runtime.artifact.format import ADAPTER, CACHE, MANIFEST, Manifest, Port, Shape
from partc.runtime.artifact.generation import (
    DECODE,
    DRAFT,
    ENCODE,
    PREFILL,
    EncoderRecord,
    GenerationRecord,
    binds_rows,
    kind_and_size,
)
from partc.runtime.artifact.graph.cache_append import entries_axis, replaced
from partc.runtime.artifact.tensors.boxes import distinct, full_region, overlap, region, remaining
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation


def encoder_faults(subject: Subject, record: GenerationRecord, rows: int) -> Iterator[str]:
    """Yields the faults of an encoder's record for one of the programs; `rows`: the rows of the program's step."""
    encoder, manifest = record.encoder, subject.manifest
    if manifest.is_main and (ENCODE in subject.others) != (encoder is not None):
        there = f"there is {'a' if encoder is None else 'no'} program '{ENCODE}'"
        yield f"{there}, and the generation has {'no' if encoder is None else 'an'} encoder"
    if encoder is None:
        return
    inputs = {port.name: port for port in manifest.inputs}
    if encoder.count and (manifest.name != ENCODE or encoder.count in inputs):  # an encoder may have no use for it
        yield from _input("count", encoder.count, inputs, "tensor(int64)", [rows])
    if manifest.is_main and encoder.count and encoder.shape != [encoder.length]:
        yield f"the encoder's input has the shape {encoder.shape}, and at most {encoder.length} entries"
    if manifest.is_main:
        for token in encoder.start:
            if not 0 <= token < record.vocabulary:
                yield f"a decoder begins with {token}, which is not a token; tokens are 0 to {record.vocabulary - 1}"
    if manifest.name == ENCODE:
        yield from _input("input", encoder.input, inputs, encoder.type, [rows, *encoder.shape])
        for law in inputs[encoder.input].ids if encoder.input in inputs else ():
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
    """Yields the faults of the room in caches; for several caches of one shape only the first."""
    told = set[tuple[int, ...]]()
    for one in (one for one in subject.manifest.state if one.kind == CACHE and one.next and one.ranks):
        model = subject.models.get(one.ranks[0])
        axis = entries_axis(model, one) if model is not None else None
        if axis is not None and one.shape[axis] != encoder.length and tuple(one.shape) not in told:
            told.add(tuple(one.shape))
            yield f"the cache '{one.value}' has {one.shape[axis]} entries; the encoder gives {encoder.length}"


_AGAIN = "compile the model again"


def check_generation(subject: Subject) -> list[Violation]:
    """Returns the violations of the manifest's `generation` section for one of a decoder's programs."""
    manifest, record = subject.manifest, subject.generation
    if record is None:
        kept = [one.value for one in manifest.state if one.kind == CACHE] if manifest.is_main else []
        facts = [f"ranks keep the cache '{value}', and the manifest has no generation" for value in kept[:1]]
    elif manifest.is_main and (manifest.name != DECODE or not {PREFILL, *record.narrow} <= {*subject.others}):
        programs = ", ".join([manifest.name, *subject.others])
        wanted = " and ".join(f"'{name}'" for name in (DECODE, PREFILL, *record.narrow))
        facts = [f"its programs are {programs}; tokens are made by {wanted}"]
    elif manifest.name == ENCODE:
        facts = [*encoder_faults(subject, record, record.runs)]
    elif not manifest.is_main and not binds_rows(manifest.name):
        facts = []
    elif record.slots % (record.runs * record.groups):
        facts = [f"its {record.slots} slots are not {record.runs} equal runs of {record.groups} equal groups"]
    else:
        rows = record.rows_of(manifest.name) or record.slots // record.groups
        facts = [
            *_ports(manifest, record, rows),
            *_caches(subject, record, rows),
            *_states(subject, record),
            *_adapters(manifest, record),
            *(
                f"a sequence stops at {token}, which is not a token; tokens are 0 to {record.vocabulary - 1}"
                for token in record.stop
                if manifest.is_main and not 0 <= token < record.vocabulary
            ),
            *encoder_faults(subject, record, rows),
        ]
    return [Violation(MANIFEST, fact, "generation", help=_AGAIN) for fact in facts]


def _ports(manifest: Manifest, record: GenerationRecord, rows: int) -> Iterator[str]:
    inputs = {port.name: port for port in manifest.inputs}
    outputs = {port.name: port for port in manifest.outputs}
    names = (record.tokens, record.position, record.count)
    if len({*names}) < len(names):
        yield f"tokens, position and count are the inputs {', '.join(map(repr, names))}; each is another one"
    kind, size = kind_and_size(manifest.name)
    width = 1 if kind == DECODE else size or record.chunk
    yield from _port("tokens", "input", record.tokens, inputs, [rows, width], None if record.padded else manifest)
    yield from _port("position", "input", record.position, inputs, [rows])
    yield from _port("count", "input", record.count, inputs, [rows])
    if record.adapter:
        yield from _port("adapter", "input", record.adapter, inputs, [rows])
    if (embedding := record.embedding) is not None:
        yield from _port("embedding", "output", embedding.output, outputs, [rows, embedding.width])
        yield from _shards("embedding", embedding.output, outputs, [rows, embedding.width])
    scored = size if kind == DRAFT else 1
    if record.draft is not None:
        yield from _port("scored", "input", record.draft.scored, inputs, [rows, scored])
    results = rows * scored
    yield from _port("next", "output", record.next, outputs, [results])
    if record.groups == 1 and record.next in outputs and len(outputs[record.next].ranks) != manifest.ranks:
        yield f"the output '{record.next}' is not given to all {manifest.ranks} ranks"
    if record.logits:
        yield from _port("logits", "output", record.logits, outputs, [results, record.vocabulary])
        yield from _shards("logits", record.logits, outputs, [results, record.vocabulary])


def _port(
    what: str, side: str, name: str, ports: dict[str, Port], shape: Sequence[int], bound: Manifest | None = None
) -> Iterator[str]:
    """Yields the faults of a port; with `bound`, a last dim above 1 must be a symbol with at most this value."""
    port = ports.get(name)
    if port is None:
        yield f"{what}: there is no {side} '{name}'"
    elif not (port.shape == [*shape] if bound is None or shape[-1] == 1 else _is_within(port.shape, shape, bound)):
        dims = [*shape] if bound is None else [*shape[:-1], f"1 to {shape[-1]}"]
        yield f"{what}: the {side} '{name}' has the shape {port.shape}; it must be [{', '.join(map(str, dims))}]"


def _shards(what: str, name: str, ports: dict[str, Port], shape: list[int]) -> Iterator[str]:
    """Yields the faults of the shards of an output that the ranks return in shards."""
    port = ports.get(name)
    if port is None or port.boxes is None or port.shape != shape:
        return
    regions = [region(box, shape) for _, box in distinct(port)]
    if missing := remaining([full_region(shape)], regions):
        yield f"{what}: no rank has the part {missing[0]} of the output '{name}'"
    if (twice := overlap(regions)) is not None:
        yield f"{what}: shards of the output '{name}' have {twice} in common; they are equal or disjoint"


def _is_within(shape: Shape, most: Sequence[int], manifest: Manifest) -> bool:
    if shape is None or len(shape) != len(most) or shape[:-1] != [*most[:-1]]:
        return False
    law = manifest.symbols.get(str(shape[-1]))
    return law is not None and law.max is not None and law.max <= most[-1]


def _states(subject: Subject, record: GenerationRecord) -> Iterator[str]:
    """Yields states that the record omits, or names wrongly: prompts do not share states, and invalid tokens must not change them."""
    replaced_states = set[str]()
    for rank, *_ in subject.manifest.by_file(subject.models).values():
        kept = [one for one in subject.manifest.state if rank in one.ranks]
        replaced_states |= replaced(subject.models[rank], kept)
    for value in sorted(replaced_states - {*record.states}):
        yield f"each token replaces '{value}', and the generation does not name it"
    for value in sorted({*record.states} - replaced_states):
        yield f"the generation names the state '{value}', which no node replaces"
    if record.states and record.chunk > 1:
        yield f"a step has {record.chunk} tokens, and each of them replaces '{record.states[0]}'"


def _adapters(manifest: Manifest, record: GenerationRecord) -> Iterator[str]:
    """Yields the faults of adapters' stacks: each has a place for every adapter, and one for none; a module has both A and B."""
    stacks = [one for one in manifest.state if one.kind == ADAPTER]
    names = {one.tensor for one in stacks}
    pairs = ((name.replace(".lora_A.", ".lora_B."), name.replace(".lora_B.", ".lora_A.")) for name in sorted(names))
    if alone := next((pair for pair in pairs if not names.issuperset(pair)), None):
        yield f"ranks keep one of '{alone[1]}' and '{alone[0]}'; an adapter has both"
    for one in stacks:
        if len(one.shape) != 3 or one.shape[0] != len(record.adapters) + 1 or one.next:
            fact = f"'{one.value}' has the shape {one.shape}, and is {'replaced' if one.next else 'kept'} by a step"
            yield f"{fact}; it has three dims, of {len(record.adapters)} adapters and none, and no step replaces it"
            return


def _caches(subject: Subject, record: GenerationRecord, rows: int) -> Iterator[str]:
    """Yields the faults of the caches' room and rows; for several caches of one shape only the first."""
    needed = record.cut * record.room_for_entries
    told = set[tuple[int, ...]]()
    for cache in (one for one in subject.manifest.state if one.kind == CACHE and one.ranks):
        if (shape := tuple(cache.shape)) in told:
            continue
        told.add(shape)
        if cache.shape[0] != rows:
            yield f"the cache '{cache.value}' has {cache.shape[0]} rows; a step of {subject.manifest.name} computes {rows}"
        model = subject.models.get(cache.ranks[0])
        axis = entries_axis(model, cache) if model is not None else None
        if axis is not None and cache.shape[axis] < needed:
            fact = f"the cache '{cache.value}' has room for {cache.shape[axis]} entries"
            yield f"{fact}; sequences of {record.length} tokens in chunks of {record.chunk} need {needed}"
