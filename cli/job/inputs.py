"""Reads a run's inputs: members of an .npz, single .npy files, or random values; each rank reads only its own inputs.

All errors in files, names and sizes of symbols are reported together, before any value is read. Random values depend only on the seed
and the input's name, so that all ranks generate the same ones; a symbol that a file binds has the file's size. A sequence `s` is stored
as the members `s.0`, `s.1` and so on; types that numpy cannot store (bfloat16, float8, int4) are stored as float32, int8 or uint8. A
sequence or an optional without a value is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import Manifest, Port, SymbolRecord
from partc.runtime.artifact.legal_sizes import smallest
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Array, Dtype
from partc.runtime.artifact.training.data_spec import literal
from partc.runtime.data.constants import as_input
from partc.runtime.data.convert import described
from partc.runtime.data.memory import Memory
from partc.runtime.data.npy import BROKEN, Archive, read_array, reason
from partc.runtime.errors import UsageError
from partc.runtime.files.regular import fault
from partc.runtime.spellings import numbered

Value = Array | list[Array] | None

_WORDS = ("one", "two", "three", "four", "five")
_INTEGERS_BELOW = 2
_RANDOM_BYTES = 8


@dataclass(frozen=True)
class InputReader:
    """The source of each input of a model; `read` returns the values."""

    ports: Mapping[str, Port]
    members: Mapping[str, tuple[Path, str | None]]
    seed: int | None
    sizes: Mapping[str, int]
    literals: Mapping[str, Array] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def read(self, names: Iterable[str]) -> dict[str, Value]:
        """Returns the values of these inputs, in the model's types."""
        return {name: self._value(self.ports[name]) for name in names}

    def _value(self, port: Port) -> Value:
        if port.name in self.literals:
            return self.literals[port.name]
        if port.name in self.members:
            return _fit(self._load(port.name), port)
        listed = takewhile(self.members.__contains__, numbered(port.name, ".", 0))
        items = [_fit(self._load(item), port) for item in listed]
        if items or port.type.startswith("seq("):
            return items
        if port.type.startswith("optional("):
            return None
        assert self.seed is not None
        return _random(port, self.seed, self.sizes, self.memory)

    def generated(self) -> list[str]:
        """Returns the names of the inputs that get random values."""
        return [name for name in self.ports if not self.has(name) and self.ports[name].type.startswith("tensor(")]

    def bound(self, symbols: Mapping[str, SymbolRecord]) -> dict[str, tuple[int, str]]:
        """Maps each symbol to its size in the shapes of the inputs from files or literals, with the name of that input."""
        sizes_found: dict[str, tuple[int, str]] = {}
        for name, port in self.ports.items():
            shape = self._shape(name) if port.shape is not None else ()
            for dim, size in zip(port.shape or (), shape, strict=False):
                if dim in symbols:
                    sizes_found.setdefault(str(dim), (size, name))
        return sizes_found

    def has(self, name: str) -> bool:
        """Whether an input has a file or a literal."""
        return name in self.literals or name in self.members or f"{name}.0" in self.members

    def _shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an input's tensor; () where it has none, or where its file is broken, which reading it reports later."""
        if name in self.literals:
            return self.literals[name].shape
        if name not in self.members:
            return ()
        path, member = self.members[name]
        try:
            return read_array(path).shape if member is None else Archive(path, self.memory).shape(member)
        except BROKEN:
            return ()

    def _load(self, name: str) -> Array:
        path, member = self.members[name]
        try:
            return read_array(path) if member is None else Archive(path, self.memory).load(member)
        except BROKEN as error:
            place = f"{path}: '{member}'" if member else str(path)
            raise UsageError(f"{place} cannot be read: {reason(error)}") from None


def open_inputs(
    manifest: Manifest, specs: Sequence[str], seed: int | None, sizes: Mapping[str, int], max_bytes: int | None = None
) -> InputReader:
    """Opens the sources of all inputs of the model. Raises UsageError with all errors in `specs` and `sizes`.

    Data that is not memory-mapped takes at most `max_bytes` of memory, by default half of the machine's.
    """
    ports = {port.name: port for port in manifest.inputs}
    members: dict[str, tuple[Path, str | None]] = {}
    literals: dict[str, Array] = {}
    problems: list[str] = []
    for spec in specs:
        try:
            if (value := _literal(spec, ports)) is not None:
                literals |= value
                continue
            found = _members(spec, ports)
        except ValueError as error:
            problems.append(str(error))
            continue
        for name, source in found.items():
            if name.rpartition(".")[0] not in ports and name not in ports:
                problems.append(f"{source[0]}: '{name}' is not an input of the model{_choice('inputs', ports)}")
            elif name in members:
                problems.append(f"{source[0]}: input '{name}' is already read from {members[name][0]}")
            members[name] = source
    reader = InputReader(ports, members, seed, {}, literals, Memory(max_bytes))
    chosen: dict[str, int] = {}
    if seed is not None:
        chosen, wrong = choose_sizes(manifest.symbols, sizes)
        problems.extend(wrong)
        for name, (size, port) in reader.bound(manifest.symbols).items() if reader.generated() else ():
            if sizes.get(name, size) != size:
                problems.append(f"--set {name}={sizes[name]}: it is {size} by input '{port}'")
            chosen[name] = size
    elif sizes:
        problems.append("--set is the size of random inputs: add --random SEED")
    for name in (name for name in ports if not reader.has(name)):
        missing = ports[name]
        if missing.type.startswith(("optional(", "seq(")):
            continue
        if seed is None:
            problems.append(f"input '{name}' ({described(missing)}) has no value")
        elif not missing.type.startswith("tensor(") or missing.shape is None:
            problems.append(f"input '{name}' ({described(missing)}) cannot be random: its shape is not known")
    if problems:
        help = "  help: use --input x.npz or --input name=file.npy for every input, or --random SEED for all"
        raise UsageError("\n".join([*problems, help]))
    return replace(reader, sizes=chosen)


def _literal(spec: str, ports: Mapping[str, Port]) -> dict[str, Array] | None:
    """Maps the input of `name=0.5` to its value; None where `spec` is a file. Raises ValueError where the value does not fit the input."""
    name, equals, text = spec.partition("=")
    number = literal(text) if equals and name in ports and not Path(spec).exists() and not Path(text).exists() else None
    if number is None:
        return None
    try:
        return {name: as_input(ports[name], number)}
    except ValueError as error:
        raise ValueError(f"input '{name}': {error}") from None


def _members(spec: str, ports: Mapping[str, Port]) -> dict[str, tuple[Path, str | None]]:
    """Maps inputs to the files of one --input. Raises ValueError with the reason where there are none."""
    name, equals, file = spec.partition("=")
    if equals and not Path(spec).exists():
        path = Path(file)
        if why := fault(path):
            raise ValueError(f"{file}: {why}, for input '{name}'")
        if path.suffix == ".npz":
            raise ValueError(f"{file}: an .npz holds several arrays; use it without '{name}='")
        return {name: (path, None)}
    path = Path(spec)
    if why := fault(path):
        raise ValueError(f"{spec}: {why}")
    if path.suffix == ".npy":
        if len(ports) == 1:
            return {next(iter(ports)): (path, None)}
        raise ValueError(f"{spec}: name its input, as in {next(iter(ports), 'name')}={spec}")
    try:
        return {name: (path, name) for name in Archive(path, Memory(0))}
    except BROKEN:
        raise ValueError(f"{spec}: not a valid .npz file") from None


def _choice(noun: str, names: Iterable[str]) -> str:
    listed = ", ".join(repr(name) for name in names)
    return f"; the {noun} are {listed}" if listed else f"; there are no {noun}"


def choose_sizes(symbols: Mapping[str, SymbolRecord], requested: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Returns a size for every symbol, the requested or else the smallest one, and the errors in the requested sizes."""
    problems = [
        f"--set {name}={requested[name]}: no such symbol{_choice('symbols', symbols)}"
        for name in requested
        if name not in symbols
    ]
    for name, size in requested.items():
        if name in symbols and (law := _broken_law(symbols[name], size)):
            problems.append(f"--set {name}={size}: {law}")
    return {name: requested.get(name, smallest(symbol)) for name, symbol in symbols.items()}, problems


def _broken_law(symbol: SymbolRecord, size: int) -> str:
    if size < symbol.min:
        return f"it must be at least {symbol.min}"
    if symbol.max is not None and size > symbol.max:
        return f"it must be at most {symbol.max}"
    if symbol.divisor > 1 and (size < symbol.divisor + symbol.remainder or (size - symbol.remainder) % symbol.divisor):
        rest = f" + {symbol.remainder}" if symbol.remainder else ""
        return f"it must be {symbol.divisor}*N{rest} with N at least 1"
    return ""


def _element(port: Port) -> Dtype | None:
    """Returns the element type of a port, also of a sequence's or an optional's; None for text."""
    return BY_NAME.get(port.type[port.type.rindex("(") + 1 : port.type.index(")")])


def _fit(array: Array, port: Port) -> Array:
    """Converts an array to the runtime's type: types that numpy cannot store are read from a wider type."""
    element = _element(port)
    if element is None:
        return array.astype(object) if array.dtype.kind == "U" else array
    if not element.wide:
        return array
    if array.dtype.kind == "V" and array.dtype.itemsize == element.numpy.itemsize:
        return array.view(element.numpy)
    return array.astype(element.numpy) if array.dtype == element.wide else array


def _random(port: Port, seed: int, sizes: Mapping[str, int], memory: Memory) -> Array:

    assert port.shape is not None
    generator = np.random.default_rng([seed, *port.name.encode()])
    shape = tuple(dim if isinstance(dim, int) else parse(dim, sizes)(sizes) for dim in port.shape)
    element = _element(port)
    try:
        memory.take(
            math.prod(shape) * _RANDOM_BYTES, f"random '{port.name}' of {list(shape)}", "choose smaller sizes by --set"
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if element is None:
        return generator.choice(np.array(_WORDS, dtype=object), size=shape)
    wanted = np.dtype(element.wide) if element.wide else element.numpy
    if wanted.kind == "b":
        return generator.integers(0, 2, size=shape).astype(wanted)
    if wanted.kind in "iu" or port.labels is not None:
        return generator.integers(0, _below(port), size=shape).astype(element.numpy)
    values = generator.standard_normal(size=shape)
    if wanted.kind == "c":
        return (values + 1j * generator.standard_normal(size=shape)).astype(wanted)
    return values.astype(wanted).astype(element.numpy)


def _below(port: Port) -> int:
    """Returns the exclusive upper bound of an input's random integers: for labels the number of classes, for ids the rows of the tables."""
    if port.labels is not None and port.labels.classes:
        return port.labels.classes
    return min([_INTEGERS_BELOW, *(one.rows for one in port.ids)])
