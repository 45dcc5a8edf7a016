"""The start of a step: checks the inputs, binds dims to symbols, and makes all ranks agree before any value moves.

Every rank puts the dims of the inputs that it reads into one vector; one agreement makes the vectors equal. So all ranks know all bindings,
check them against the same laws, and refuse a step with the same words. A problem that only one rank can see (a missing input, a wrong
dtype) sets a flag in the vector, and then the ranks exchange their texts. The dims in the vector are those of the global value: a rank that
has a shard of an input computes them from its box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.boxes import divisor
from partc.runtime.artifact.tensors.dtypes import Dtype
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..artifact import dim_expression as expression
from ..artifact.format import Manifest, Port
from ..artifact.legal_sizes import is_legal, refusal
from ..communication.transport import Agreements, Transport, Vector
from ..errors import InputError
from .inputs import InputReader, SameArrays, Whole

Bindings: TypeAlias = dict[str, int]

_PROBLEM, _HALT = 1, 2
_BETWEEN = "\x1e"
_UNSEEN = np.iinfo(np.int64).min


class Halted(Exception):
    """A rank asked for no further step; raised on all ranks by the agreement at the start of a step."""


@dataclass(slots=True)
class AnnouncedStep:
    """A step whose sizes this rank has sent to the others: the inputs, their values, the problems found in them, and the agreement."""

    given: Mapping[str, object]
    values: dict[str, Value]
    problems: Sequence[str]
    vector: Vector
    agreed: Callable[[], Vector] | None
    """Waits for the vector that the ranks agree on; None where there are no other ranks: then that is `vector`."""

    def is_of(self, inputs: Mapping[str, object]) -> bool:
        """Whether `inputs` are the same objects as the step's inputs."""
        given = self.given
        return given.keys() == inputs.keys() and all(given[name] is value for name, value in inputs.items())


@dataclass
class Binder:
    """Binds the symbols of a rank's inputs; `read` has the names of the inputs that it reads."""

    manifest: Manifest
    rank: int
    read: frozenset[str]
    sized: Mapping[str, tuple[Dtype, Sequence[int | str]]] = field(default_factory=dict)
    """Maps inputs of which this rank reads only the sizes to their type and its shard's shape; unread memory replaces their values."""

    def __post_init__(self) -> None:
        self.bound = bound_symbols(self.manifest)
        self._names = {port.name for port in self.manifest.inputs}
        self._known = ", ".join(f"'{port.name}'" for port in self.manifest.inputs) or "none"
        self._readers = [InputReader(port, self.rank) for port in self.manifest.inputs if port.name in self.read]
        self._told: Vector | None = None
        """The vector of the last step's inputs, as long as inputs are valid and have the same sizes; else None."""
        self._last: tuple[Vector, bytes, Bindings] = np.empty(0, np.int64), b"", {}
        """The agreed vector of the last valid step, its sizes as bytes, and its bindings."""
        self._last_of_all: tuple[tuple[tuple[int, ...], ...], Bindings] = (), {}
        """The shapes of the inputs with dims in the last step whose inputs were the same on all ranks, and its bindings."""
        self._same_of_all = False
        """Whether this rank has read all inputs of that step, and no input of another type or shape since then."""
        self.request = 0
        """The largest request that ranks sent with the step that was bound last."""
        self._standing: dict[str, Tensor] = {}
        self._cells = [
            (port, axis)
            for port in self.manifest.inputs
            if port.ranks and _is_tensor(port)
            for axis in range(len(port.shape or ()))
        ]

    @property
    def sizes(self) -> Bindings:
        """The bindings of the last valid step."""
        return self._last[2]

    def announce(
        self, inputs: Mapping[str, object], agreements: Agreements | None, halt: bool = False, request: int = 0
    ) -> AnnouncedStep:
        """Sends the sizes of a step to the other ranks, without waiting for theirs. With `halt` on any rank, all raise Halted.

        `request`: a number; once the step is bound, all ranks know the largest of theirs. `agreements`: None for a job of one rank.
        """
        values, problems = self._read(inputs)
        vector = self._told
        if vector is None:
            vector = self._vector(values)
            self._told = vector if not problems else None
        if halt or problems or request or agreements is not None:
            vector = vector.copy()
            vector[0], vector[-1] = _HALT if halt else _PROBLEM if problems else 0, request
        return AnnouncedStep(inputs, values, problems, vector, None if agreements is None else agreements.begin(vector))

    def of_all(self, inputs: Mapping[str, object]) -> tuple[Bindings, dict[str, Value]]:
        """Returns the bindings and values of a step with the same global inputs on all ranks, so that each rank knows all sizes.

        All ranks raise the same InputError, since each finds the same problems.
        """
        if type(inputs) is SameArrays and (there := inputs.read.get(self.rank)) is not None:
            return there
        values, problems = self._read(inputs)
        if problems:
            raise InputError("\n".join(problems))
        if not self._same_of_all:
            self._bind_all(inputs)
        bindings = self._last_of_all[1]
        found = bindings, {**values, **self._stand_ins(bindings)} if self.sized else values
        if type(inputs) is SameArrays and inputs.hold(values):
            inputs.read[self.rank] = found
        return found

    def _bind_all(self, inputs: Mapping[str, object]) -> None:
        """Binds the symbols of inputs that are global values on all ranks; InputError where they break a law."""
        shapes = tuple(_shape(inputs[port.name]) for port, _ in self._cells if port.name in inputs)
        if shapes != self._last_of_all[0]:
            vector = np.full(2 + 2 * len(self._cells), _UNSEEN, np.int64)
            for index, (port, axis) in enumerate(self._cells):
                shape = _shape(inputs[port.name]) if port.name in inputs else ()
                if len(shape) == len(port.shape or ()):
                    vector[1 + 2 * index], vector[2 + 2 * index] = shape[axis], -shape[axis]
            bindings: Bindings = {}
            if found := [*self._violations(vector, bindings)]:
                raise InputError("\n".join(found))
            self._last_of_all = shapes, bindings
        self._same_of_all = all(port.name in self.read for port, _ in self._cells)

    def bind(self, step: AnnouncedStep, transport: Transport) -> tuple[Bindings, dict[str, Value]]:
        """Returns an announced step's bindings, and the values of the inputs that this rank reads; InputError is raised on all ranks."""
        values, agreed = step.values, step.vector if step.agreed is None else step.agreed()
        last, _, bindings = self._last
        if agreed is last:  # a job of one rank, with the sizes of its last step
            self.request = 0
        else:
            bindings = self._bound(agreed, step, transport)
        return bindings, {**values, **self._stand_ins(bindings)} if self.sized else values

    def _bound(self, agreed: Vector, step: AnnouncedStep, transport: Transport) -> Bindings:
        """Returns the bindings that all ranks have agreed on; InputError where they break a law."""
        self.request = int(agreed[-1])
        if agreed[0] == _HALT:
            raise Halted
        _, key, bindings = self._last
        sizes = agreed[1:-1].tobytes()
        if agreed[0] or sizes != key:
            texts = transport.all_gather_text(_BETWEEN.join(step.problems)) if agreed[0] else []
            bindings = {}
            told = [problem for text in texts for problem in text.split(_BETWEEN) if problem]
            found = list(dict.fromkeys(told)) + list(self._violations(agreed, bindings))
            if found:
                raise InputError("\n".join(found))
        self._last = agreed, sizes, bindings
        return bindings

    def _stand_ins(self, bindings: Bindings) -> dict[str, Value]:
        """Returns memory, never read or written, of the agreed sizes for the inputs in `sized`; InputError where a size is not a number."""
        symbols, problems = self.manifest.symbols, []
        for name, (dtype, dims) in self.sized.items():
            try:
                shape = tuple(expression.parse(dim, symbols)(bindings) for dim in dims)
                if min(shape, default=0) < 0:
                    raise ValueError(f"it is {shape}")
            except ValueError as error:
                problems.append(f"with {spelled(bindings)} the input '{name}' has no size: {error}")
                continue
            there = self._standing.get(name)
            if there is None or there.shape != shape:
                self._standing[name] = Tensor.empty(dtype, shape)
        if problems:
            raise InputError("\n".join(problems))
        return dict(self._standing)

    def check_promises(self, bindings: Bindings) -> None:
        """Raises InputError, the same on all ranks, unless every size that the manifest promises is an integer of at least 0."""
        faults: dict[int | str, str] = {}
        for dim, promise in self._promises.items():
            try:
                size = promise(bindings)
                fault = f"{dim} is {size}" if size < 0 else ""
            except ValueError as error:
                fault = str(error)
            if fault:
                faults[dim] = fault
        if faults:
            problems = {
                f"with {spelled(bindings)} the value '{name}' has no size along axis {axis}: {faults[dim]}": None
                for name, axis, dim in self._promised()
                if dim in faults
            }
            raise InputError("\n".join(problems))

    def _promised(self) -> Iterator[tuple[str, int, int | str]]:
        """Yields (value, axis, dim) for each value whose size the manifest promises."""
        stated = [(one.value, one.shape) for one in self.manifest.transfers]
        stated += [(one.value, one.shape) for one in self.manifest.collectives]
        stated += [(port.name, port.shape) for port in self.manifest.outputs]
        for name, shape in stated:
            for axis, dim in enumerate(shape or ()):
                yield name, axis, dim

    @cached_property
    def _promises(self) -> dict[int | str, expression.Expression]:
        """Maps each promised dim that the inputs decide to its expression."""
        dims = dict.fromkeys(dim for _, _, dim in self._promised())
        found = {dim: expression.parse(dim, self.manifest.symbols) for dim in dims}
        return {dim: promise for dim, promise in found.items() if promise.names <= self.bound}

    @cached_property
    def _laws(self) -> list[tuple[int | str, int, str]]:
        """Has for each cell its dim, the number of its shards, and the name of its place for messages."""
        found = []
        for port, axis in self._cells:
            parts = divisor(port.boxes or [], axis)
            where = f"input '{port.name}' axis {axis}" + (" in all" if parts > 1 else "")
            found.append(((port.shape or [])[axis], parts, where))
        return found

    def _read(self, inputs: Mapping[str, object]) -> tuple[dict[str, Value], list[str]]:
        values: dict[str, Value] = {}
        problems: list[str] = []
        for reader in self._readers:
            name = reader.name
            if name not in inputs:
                problems.append(f"the input '{name}' is missing\n  help: the model's inputs are {self._known}")
                self._told, self._same_of_all = None, False
                reader.forget()
                continue
            fed = inputs[name]
            try:
                if not reader.read_again(fed, values):
                    self._told, self._same_of_all = None, False
                    reader.read(fed, values)
            except ValueError as error:
                problems.append(f"input '{name}': {error}")
            except Exception as error:
                # Whatever converting a caller's object raises must not keep this rank from the agreement.
                problems.append(f"input '{name}': a {type(fed).__name__} is not an array: {error}")
        if len(values) < len(inputs) and not inputs.keys() <= self._names:
            unknown = (name for name in inputs if name not in self._names)
            text = "the model has no input '{}'\n  help: its inputs are {}"
            problems = [*(text.format(name, self._known) for name in unknown), *problems]
        return values, problems

    def _vector(self, values: Mapping[str, Value]) -> Vector:
        """Returns this rank's vector: for each cell its dim and the negated dim, so that the maxima over all ranks show disagreement.

        The first number is the flag for a problem, whose largest value wins; the last one is the rank's request.
        """
        vector = np.full(2 + 2 * len(self._cells), _UNSEEN, np.int64)
        vector[0] = vector[-1] = 0
        sizes = {reader.name: reader.sizes or () for reader in self._readers if reader.name in values}
        for index, (port, axis) in enumerate(self._cells):
            own = sizes.get(port.name, ())
            if len(own) == len(port.shape or ()):
                vector[1 + 2 * index] = own[axis]
                vector[2 + 2 * index] = -own[axis]
        return vector

    def _violations(self, vector: Vector, bindings: Bindings) -> Iterator[str]:
        """Fills in `bindings`, and yields a message for every law that the dims break."""
        symbols = self.manifest.symbols
        origin: dict[str, str] = {}
        later: list[tuple[str, int, str]] = []
        numbers = vector.tolist()
        for (dim, parts, where), size, negative in zip(self._laws, numbers[1:-1:2], numbers[2:-1:2], strict=True):
            other = -negative
            if size == _UNSEEN or (size == other == dim and parts == 1):
                continue
            if size != other:
                yield f"{where} is not the same on all ranks: {other} to {size}\n  help: give every rank the same input"
            elif isinstance(dim, int):
                if size != dim:
                    yield f"{where} is {size}, the model was compiled for {dim}"
            elif dim not in symbols:
                later.append((where, size, dim))
            elif dim not in bindings:
                bindings[dim], origin[dim] = size, where
                if not is_legal(size, symbols[dim]):
                    yield refusal(where, size, dim, symbols[dim])
            elif bindings[dim] != size:
                yield f"{where} is {size}, but '{dim}' is {bindings[dim]} by {origin[dim]}\n  the two must be equal"
            if size == other and size % parts and not (dim in symbols and not is_legal(size, symbols[str(dim)])):
                yield f"{where} is {size}, and it is sharded into {parts}\n  help: give a multiple of {parts}"
        for where, size, dim in later:
            promise = expression.parse(dim, symbols)
            if promise.names <= bindings.keys():
                try:
                    wanted = str(promise(bindings))
                except ValueError as error:
                    wanted = str(error)
                if wanted != str(size):
                    yield f"{where} is {size}, but {dim} is {wanted} with {spelled(bindings)}"


def spelled(bindings: Mapping[str, int]) -> str:
    """Formats bindings for messages: `batch = 8, seq = 5`."""
    return ", ".join(f"{name} = {value}" for name, value in sorted(bindings.items())) or "no symbols"


def bound_symbols(manifest: Manifest) -> frozenset[str]:
    """Returns the symbols that the inputs of a step bind; no rank knows the others before the step runs."""
    return frozenset(
        dim
        for port in manifest.inputs
        if port.ranks and _is_tensor(port)
        for dim in port.shape or ()
        if isinstance(dim, str) and dim in manifest.symbols
    )


def _shape(given: object) -> tuple[int, ...]:
    """Returns the shape of an input's global value."""
    return np.asarray(given.value if isinstance(given, Whole) else given).shape


def _is_tensor(port: Port) -> bool:
    return port.shape is not None and port.type.startswith("tensor(")
