"""Reads a run's inputs: members of an .npz, single .npy files, or random values; each rank reads only its own inputs.

All errors in files, names and sizes of symbols are reported together, before any value is read. Random values depend on the seed
and the input's name alone, so that all ranks generate the same. A sequence `s` is stored as the members `s.0`, `s.1` and so on; types
that numpy cannot store (bfloat16, float8, int4) are stored as float32, int8 or uint8. A sequence or an optional without value is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from partc.runtime.artifact.data_spec import literal
from partc.runtime.artifact.dtypes import BY_NAME, Array, Dtype
from partc.runtime.artifact.format import Manifest, Port, SymbolRecord
from partc.runtime.data.constants import as_input
from partc.runtime.data.memory import Memory
from partc.runtime.data.npy import BROKEN, Archive, read_array, reason
from partc.runtime.errors import UsageError
from partc.runtime.execution.symbol_bindings import smallest
from partc.runtime.files.regular import fault

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
        """The values of these inputs, in the model's types."""
        return {name: self._value(self.ports[name]) for name in names}

    def _value(self, port: Port) -> Value:
        if port.name in self.literals:
            return self.literals[port.name]
        if port.name in self.members:
            return _fit(self._load(port.name), port)
        items = [_fit(self._load(item), port) for item in self._items(port.name)]
        if items or port.type.startswith("seq("):
            return items
        if port.type.startswith("optional("):
            return None
        assert self.seed is not None
        return _random(port, self.seed, self.sizes, self.memory)

    def _items(self, name: str) -> list[str]:
        found: list[str] = []
        while f"{name}.{len(found)}" in self.members:
            found.append(f"{name}.{len(found)}")
        return found

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
    """The sources of all inputs of the model; UsageError lists all errors in `specs` and `sizes`.

    Data that is not mapped takes at most `max_bytes` of memory, by default half of the machine's.
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
    chosen: dict[str, int] = {}
    if seed is not None:
        chosen, wrong = choose_sizes(manifest.symbols, sizes)
        problems.extend(wrong)
    elif sizes:
        problems.append("--set is the size of random inputs: add --random SEED")
    given = {name for name in ports if name in members or name in literals or f"{name}.0" in members}
    for name in (name for name in ports if name not in given):
        port = ports[name]
        if port.type.startswith(("optional(", "seq(")):
            continue
        if seed is None:
            problems.append(f"input '{name}' ({describe(port)}) has no value")
        elif not port.type.startswith("tensor(") or port.shape is None:
            problems.append(f"input '{name}' ({describe(port)}) cannot be random: its shape is not known")
    if problems:
        help = "  help: use --input x.npz or --input name=file.npy for every input, or --random SEED for all"
        raise UsageError("\n".join([*problems, help]))
    return InputReader(ports, members, seed, chosen, literals, Memory(max_bytes))


def _literal(spec: str, ports: Mapping[str, Port]) -> dict[str, Array] | None:
    """The value of `name=0.5` by its input; None where `spec` is a file. ValueError where the value does not fit the input."""
    name, equals, text = spec.partition("=")
    number = literal(text) if equals and name in ports and not Path(spec).exists() and not Path(text).exists() else None
    if number is None:
        return None
    try:
        return {name: as_input(ports[name], number)}
    except ValueError as error:
        raise ValueError(f"input '{name}': {error}") from None


def _members(spec: str, ports: Mapping[str, Port]) -> dict[str, tuple[Path, str | None]]:
    """The files of one --input, by input; ValueError with the reason if there are none."""
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


def describe(port: Port) -> str:
    """A port as messages write it: `tensor(float) [batch, 10]`."""
    return port.type if port.shape is None else f"{port.type} [{', '.join(map(str, port.shape))}]"


def choose_sizes(symbols: Mapping[str, SymbolRecord], given: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """A size for every symbol, the given one or the smallest, and the errors in those given."""
    problems = [
        f"--set {name}={given[name]}: no such symbol{_choice('symbols', symbols)}"
        for name in given
        if name not in symbols
    ]
    for name, size in given.items():
        if name in symbols and (law := _broken_law(symbols[name], size)):
            problems.append(f"--set {name}={size}: {law}")
    return {name: given.get(name, smallest(symbol)) for name, symbol in symbols.items()}, problems


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
    """The element type of a port, also of a sequence's or an optional's; None for text."""
    return BY_NAME.get(port.type[port.type.rindex("(") + 1 : port.type.index(")")])


def _fit(array: Array, port: Port) -> Array:
    """The array in the runtime's type: types that numpy cannot store are read as a wider type."""
    element = _element(port)
    if element is None:
        return array.astype(object) if array.dtype.kind == "U" else array
    if not element.wide:
        return array
    if array.dtype.kind == "V" and array.dtype.itemsize == element.numpy.itemsize:
        return array.view(element.numpy)
    return array.astype(element.numpy) if array.dtype == element.wide else array


def _random(port: Port, seed: int, sizes: Mapping[str, int], memory: Memory) -> Array:
    from partc.runtime.artifact.dim_expression import parse

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
    if wanted.kind in "iu":
        return generator.integers(0, _INTEGERS_BELOW, size=shape).astype(element.numpy)
    if port.labels is not None:
        return generator.integers(0, min(port.labels.classes or 2, _INTEGERS_BELOW), size=shape).astype(element.numpy)
    values = generator.standard_normal(size=shape)
    if wanted.kind == "c":
        return (values + 1j * generator.standard_normal(size=shape)).astype(wanted)
    return values.astype(wanted).astype(element.numpy)
