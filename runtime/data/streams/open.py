"""Opens a stream: what the plan says of it is held against what a stream can do, before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partc.runtime.artifact.training.data_spec import Spec

from ...artifact.format import Port
from ...errors import UsageError
from ..code import Code, Transform
from ..rank_inputs import RankInputs, uneven_batch, uneven_rest
from ..sources.naming import Naming, quoted
from ..sources.user_source import Kind, UserSource
from .batches import StreamBatches
from .loader_stream import LoaderStream
from .reader import StreamReader
from .record_stream import RecordStream
from .stream import Stream


def open_stream(
    found: UserSource,
    spec: Spec,
    ports: Sequence[Port],
    rank: int,
    batch: int | None,
    seed: int,
    drop_last: bool,
    interleave: int,
    code: Code,
    lenient: bool = False,
) -> StreamBatches:
    """The batches that a rank reads of a `DataLoader` or an iterable; UsageError, the same on all ranks, with all that is wrong."""
    problems = list(_need_an_index(found, spec, interleave))
    transform = None
    try:
        transform = Transform.load(spec.transform, code) if spec.transform else None
    except UsageError as error:
        problems.append(f"transform: {error}")
    inputs = RankInputs(ports, rank)
    naming = Naming(spec.fields, () if spec.transform else tuple(port.name for port in ports))
    reader = StreamReader(spec, found.where, inputs, naming, transform, seed)
    if not problems:
        stream: Stream
        if found.kind is Kind.LOADER:
            stream = LoaderStream(found, batch, seed, drop_last, reader.span if inputs.own else None)
        elif batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        else:
            stream = RecordStream(found, batch)
        problems += uneven_batch(inputs, stream.batch)
        rest = stream.records % stream.batch if stream.records is not None and not drop_last else 0
        for law, _ in uneven_rest(inputs, stream.batch, rest) if rest else ():
            problems.append(
                f"{stream.records} records in batches of {stream.batch} leave {rest} for the last batch, and {law}\n"
                "  help: write drop_last: true, or choose a batch size that leaves none"
            )
    if problems:
        raise UsageError("\n".join(f"{spec.where}: {problem}" for problem in problems))
    return StreamBatches(stream, reader, drop_last, lenient)


def _need_an_index(found: UserSource, spec: Spec, interleave: int) -> Iterator[str]:
    """What is said of the data that only records with an index can have."""
    what = f"{found.where}: its `source` is a {type(found.value).__name__}, whose records come in an order of their own"
    options = [name for name, said in (("length", spec.length), ("interleave", interleave > 1)) if said]
    if options:
        yield (
            f"{what}: {quoted(options)} cannot be had\n"
            "  help: give an object with `__len__` and `__getitem__`, or order the records in the stream"
        )
    if spec.files:
        yield f"{what}: {quoted(spec.files)} cannot be files beside it\n  help: give them as fields of its records"
    if spec.pad and found.kind is Kind.LOADER:
        yield f"{found.where}: `pad` is for records, and a DataLoader gives batches\n  help: fill them up in its `collate_fn`"
