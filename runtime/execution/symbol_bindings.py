"""The start of a step: inputs checked, dims bound to symbols, and one answer on all ranks before any value moves.

Every rank puts the dims of the inputs that it reads into one vector; one agreement makes the vectors equal. So all ranks know all
bindings, hold them against the same laws, and refuse a step with the same words. What only one rank can see (an input that is
missing, a wrong dtype) sets a flag in the vector, and then the ranks exchange their texts. The dims in the vector are those of
the whole value: a rank that has a shard of an input knows them from its box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..artifact import dim_expression as expression
from ..artifact.boxes import divisor, slices, whole_size
from ..artifact.dtypes import BY_NAME, Array, Dtype, by_numpy, dense
from ..artifact.format import Manifest, Port, SymbolRecord
from ..artifact.legal_sizes import is_legal, refusal
from ..artifact.tensor import Tensor, Value
from ..communication.transport import Agreements, Transport, Vector
from ..errors import InputError
from .input_numbers import check_numbers
from .inputs import Whole

Bindings: TypeAlias = dict[str, int]

_PROBLEM, _HALT = 1, 2
_BETWEEN = "\x1e"
_UNSEEN = np.iinfo(np.int64).min


class Halted(Exception):
    """Some rank wants no further step: raised by the agreement that begins one, on all ranks alike."""


@dataclass(slots=True)
class ToldStep:
    """A step of which this rank has told the others its sizes: the inputs as given and as values, what is wrong, and the agreement."""

    given: Mapping[str, object]
    values: dict[str, Value]
    problems: Sequence[str]
    agreed: Callable[[], Vector]

    def is_of(self, inputs: Mapping[str, object]) -> bool:
        """Whether these are the very inputs of the step."""
        given = self.given
        return given.keys() == inputs.keys() and all(given[name] is value for name, value in inputs.items())


@dataclass
class Binder:
    """What a rank knows of the inputs; `read` are the names of those that it reads."""

    manifest: Manifest
    rank: int
    read: frozenset[str]
    bound: frozenset[str] = field(init=False)
    """The symbols that the inputs of a step bind; the others are known to no rank beforehand."""
    sized: Mapping[str, tuple[Dtype, Sequence[int | str]]] = field(default_factory=dict)
    """What stands for inputs that nobody feeds to this rank, since it reads their sizes alone: the type, and the shape of its shard."""

    def __post_init__(self) -> None:
        self.bound = frozenset(
            dim
            for port in self.manifest.inputs
            if port.ranks and _is_tensor(port)
            for dim in port.shape or ()
            if isinstance(dim, str) and dim in self.manifest.symbols
        )
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._names = {port.name for port in self.manifest.inputs}
        self._known = ", ".join(f"'{port.name}'" for port in self.manifest.inputs) or "none"
        self._last: tuple[bytes, Bindings] = b"", {}
        """The agreed sizes of the last step that broke no law, and its bindings."""
        self._standing: dict[str, Tensor] = {}
        self._cells = [
            (port, axis)
            for port in self.manifest.inputs
            if port.ranks and _is_tensor(port)
            for axis in range(len(port.shape or ()))
        ]

    def tell(self, inputs: Mapping[str, object], agreements: Agreements, halt: bool = False) -> ToldStep:
        """Tells the other ranks the sizes of a step with these inputs, without waiting for theirs. With `halt` on any, all raise Halted."""
        values, problems = self._read(inputs)
        vector = self._vector(values, _HALT if halt else _PROBLEM if problems else 0)
        return ToldStep(inputs, values, problems, agreements.begin(vector))

    def bind(self, step: ToldStep, transport: Transport) -> tuple[Bindings, dict[str, Value]]:
        """The bindings of a step that was told and the inputs that this rank reads, as values; InputError on all ranks alike."""
        values, agreed = step.values, step.agreed()
        if agreed[0] == _HALT:
            raise Halted
        key, bindings = self._last
        if agreed[0] or agreed.tobytes() != key:
            texts = transport.all_gather_text(_BETWEEN.join(step.problems)) if agreed[0] else []
            bindings = {}
            told = [problem for text in texts for problem in text.split(_BETWEEN) if problem]
            found = list(dict.fromkeys(told)) + list(self._violations(agreed, bindings))
            if found:
                raise InputError("\n".join(found))
            self._last = agreed.tobytes(), bindings
        return bindings, {**values, **self._stand_ins(bindings)} if self.sized else values

    def _stand_ins(self, bindings: Bindings) -> dict[str, Value]:
        """Memory of the sizes that all ranks have agreed on, never read and so never touched; InputError where a size is no number."""
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
        """Every size that the manifest promises is a whole number of at least 0; all ranks find the same and refuse alike."""
        symbols = self.manifest.symbols
        problems: dict[str, None] = {}
        stated = [(one.value, one.shape) for one in self.manifest.transfers]
        stated += [(one.value, one.shape) for one in self.manifest.collectives]
        stated += [(port.name, port.shape) for port in self.manifest.outputs]
        for name, shape in stated:
            for axis, dim in enumerate(shape or ()):
                promise = expression.parse(dim, symbols)
                if promise.names <= self.bound:
                    try:
                        size = promise(bindings)
                        fault = f"{dim} is {size}" if size < 0 else ""
                    except ValueError as error:
                        fault = str(error)
                    if fault:
                        problems[
                            f"with {spelled(bindings)} the value '{name}' has no size along axis {axis}: {fault}"
                        ] = None
        if problems:
            raise InputError("\n".join(problems))

    def _read(self, inputs: Mapping[str, object]) -> tuple[dict[str, Value], list[str]]:
        problems = [
            f"the model has no input '{name}'\n  help: its inputs are {self._known}"
            for name in inputs
            if name not in self._names
        ]
        values: dict[str, Value] = {}
        self._sizes.clear()
        for port in self.manifest.inputs:
            if port.name not in self.read:
                continue
            if port.name not in inputs:
                problems.append(f"the input '{port.name}' is missing\n  help: the model's inputs are {self._known}")
                continue
            try:
                values[port.name] = self._shard(port, _value(port, inputs[port.name]), inputs[port.name])
                check_numbers(port, values[port.name], self.rank)
            except ValueError as error:
                problems.append(f"input '{port.name}': {error}")
            except Exception as error:
                # Whatever converting a caller's object raises must not keep this rank from the agreement.
                problems.append(f"input '{port.name}': a {type(inputs[port.name]).__name__} is no array: {error}")
        return values, problems

    def _shard(self, port: Port, value: Value, given: object) -> Value:
        """What this rank has of an input, whose whole dims are noted; ValueError where they are no whole numbers."""
        box = port.box(self.rank)
        if not isinstance(value, Tensor | np.ndarray):
            return value
        self._sizes[port.name] = value.shape
        if box is None:
            return value
        if not isinstance(given, Whole):
            self._sizes[port.name] = tuple(
                _whole_axis(axis, size, cut) for axis, (size, cut) in enumerate(zip(value.shape, box, strict=True))
            )
            return value
        if any(size % divisor(port.boxes or [], axis) for axis, size in enumerate(value.shape)):
            return value  # which is refused by all ranks, once they know the size
        array = value.array() if isinstance(value, Tensor) else value
        part = array[slices(box, array.shape)]
        return Tensor.of(part, value.dtype) if isinstance(value, Tensor) else part

    def _vector(self, values: Mapping[str, Value], flag: int) -> Vector:
        """What is wrong, of which the worst counts; for each dim of each input itself and its negative: the maximum shows disagreement."""
        vector = np.full(1 + 2 * len(self._cells), _UNSEEN, np.int64)
        vector[0] = flag
        for index, (port, axis) in enumerate(self._cells):
            sizes = self._sizes.get(port.name, ())
            if port.name in values and len(sizes) == len(port.shape or ()):
                vector[1 + 2 * index] = sizes[axis]
                vector[2 + 2 * index] = -sizes[axis]
        return vector

    def _violations(self, vector: Vector, bindings: Bindings) -> Iterator[str]:
        """Fill in the bindings; say every law that the dims break."""
        symbols = self.manifest.symbols
        origin: dict[str, str] = {}
        later: list[tuple[str, int, str]] = []
        for index, (port, axis) in enumerate(self._cells):
            size, other = int(vector[1 + 2 * index]), -int(vector[2 + 2 * index])
            dim = (port.shape or [])[axis]
            where = f"input '{port.name}' axis {axis}"
            parts = divisor(port.boxes or [], axis)
            where += " in all" if parts > 1 else ""
            if vector[1 + 2 * index] == _UNSEEN:
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
                yield f"{where} is {size}, and it is cut into {parts}\n  help: give a multiple of {parts}"
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
    """Bindings as people write them: `batch = 8, seq = 5`."""
    return ", ".join(f"{name} = {value}" for name, value in sorted(bindings.items())) or "no symbols"


def _is_tensor(port: Port) -> bool:
    return port.shape is not None and port.type.startswith("tensor(")


def _value(port: Port, given: object) -> Value:
    """An input as the runtime handles it; ValueError says what is wrong with it."""
    given = given.value if isinstance(given, Whole) else given
    dtype = dense(port.type)
    if dtype is None and port.type != "tensor(string)":
        return _general(given, port.type)
    rank = None if port.shape is None else len(port.shape)
    if dtype is not None and type(given) is np.ndarray and given.dtype is dtype.numpy and given.ndim == rank:
        return Tensor.of(given, dtype)
    try:
        array = np.asarray(given)
    except ValueError:
        raise ValueError("is not an array: its rows differ in length") from None
    if rank is not None and array.ndim != rank:
        shape = ", ".join(map(str, port.shape or ()))
        raise ValueError(f"has {array.ndim} axes, shape {array.shape}; the model takes {rank}: [{shape}]")
    if dtype is None:
        if array.dtype.kind not in "OUST":
            raise ValueError(f"is of {array.dtype}, the model takes strings")
        return array.astype(object)
    if array.dtype.newbyteorder("=") != dtype.numpy:
        raise ValueError(
            f"is of {array.dtype}, the model takes {dtype.numpy}\n  help: convert it: .astype('{dtype.numpy}')"
        )
    return Tensor.of(array.astype(dtype.numpy, copy=False), dtype)


def _whole_axis(axis: int, size: int, cut: Sequence[int]) -> int:
    try:
        return whole_size(size, cut)
    except ValueError as error:
        raise ValueError(f"axis {axis} of this rank's shard: {error}") from None


def _general(given: object, text: str) -> Value:
    """A sequence, optional or map, its element types held against the port's."""
    head, _, rest = text.partition("(")
    inner = rest[:-1]
    match head:
        case "optional":
            return None if given is None else _general(given, inner)
        case "seq":
            if not isinstance(given, list | tuple):
                raise ValueError(f"is a {type(given).__name__}, the model takes a list ({text})")
            return [_general(item, inner) for item in given]
        case "map":
            if not isinstance(given, Mapping):
                raise ValueError(f"is a {type(given).__name__}, the model takes a dict ({text})")
            return dict(given)
        case "tensor":
            return _element(np.asarray(given), BY_NAME.get(inner), text)
    raise ValueError(f"is a {text}, which cannot be given from Python")


def _element(array: Array, dtype: Dtype | None, text: str) -> Array:
    fits = by_numpy(array.dtype) == dtype if dtype else array.dtype.kind in "OUST"
    if not fits:
        raise ValueError(f"holds an array of {array.dtype}, the model takes {text}")
    return array if dtype else array.astype(object)


def smallest(symbol: SymbolRecord) -> int:
    """The smallest legal size of a symbol that is not zero."""
    least = max(symbol.min, symbol.divisor + symbol.remainder if symbol.divisor > 1 else 1)
    return least + (symbol.remainder - least) % symbol.divisor
