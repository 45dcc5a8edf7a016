"""Reads a run's inputs: members of an .npz, single .npy files, or random values; each rank reads only what it uses.

All that is wrong with what the user gave is said at once, before any value is read: files, names, sizes of symbols.
Random values depend on the seed and the input's name alone, so that every rank makes the same ones. A sequence `s` is
given as the members `s.0`, `s.1` and so on; types that numpy has no file form for (bfloat16, float8, int4) are given
as float32, int8 or uint8. A sequence or an optional that is not given is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from partc.runtime.artifact.dtypes import BY_NAME, Array, Dtype
from partc.runtime.artifact.format import Manifest, Port, SymbolRecord
from partc.runtime.data.constants import as_input
from partc.runtime.data.memory import Memory
from partc.runtime.data.npy import BROKEN, Archive, read_array, reason
from partc.runtime.data.spec import literal
from partc.runtime.errors import UsageError
from partc.runtime.execution.symbol_bindings import smallest
from partc.runtime.files.regular import fault

Value = Array | list[Array] | None

_WORDS = ("one", "two", "three", "four", "five")
_INTEGERS_BELOW = 2
_RANDOM_BYTES = 8


@dataclass(frozen=True)
class Feed:
    """Where each input of a model comes from; `read` gives the values."""

    ports: Mapping[str, Port]
    members: Mapping[str, tuple[Path, str | None]]
    seed: int | None
    sizes: Mapping[str, int]
    literals: Mapping[str, Array] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def read(self, names: Iterable[str]) -> dict[str, Value]:
        """The values of these inputs, as the model's types want them."""
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


def open_feed(
    manifest: Manifest, specs: Sequence[str], seed: int | None, sizes: Mapping[str, int], max_bytes: int | None = None
) -> Feed:
    """The sources of all inputs of the model; UsageError with everything that is wrong with what was given.

    What is not mapped takes at most `max_bytes` of memory, by default half of what there is.
    """
    ports = {port.name: port for port in manifest.inputs}
    members: dict[str, tuple[Path, str | None]] = {}
    literals: dict[str, Array] = {}
    problems: list[str] = []
    for spec in specs:
        try:
            if (said := _said(spec, ports)) is not None:
                literals |= said
                continue
            found = _members(spec, ports)
        except ValueError as error:
            problems.append(str(error))
            continue
        for name, source in found.items():
            if name.rpartition(".")[0] not in ports and name not in ports:
                problems.append(f"{source[0]}: '{name}' is no input of the model{_choice(ports)}")
            elif name in members:
                problems.append(f"{source[0]}: input '{name}' is already given by {members[name][0]}")
            members[name] = source
    chosen: dict[str, int] = {}
    if seed is not None:
        chosen, wrong = choose_sizes(manifest.symbols, sizes)
        problems.extend(wrong)
    elif sizes:
        problems.append("--set gives sizes to random inputs, and there is no --random SEED")
    given = {name for name in ports if name in members or name in literals or f"{name}.0" in members}
    for name in (name for name in ports if name not in given):
        port = ports[name]
        if port.type.startswith(("optional(", "seq(")):
            continue
        if seed is None:
            problems.append(f"input '{name}' ({describe(port)}) is not given")
        elif not port.type.startswith("tensor(") or port.shape is None:
            problems.append(f"input '{name}' ({describe(port)}) cannot be random: its shape is not known")
    if problems:
        help = "help: give every input by --input x.npz or --input name=file.npy, or all by --random SEED"
        raise UsageError("\n".join([*problems, help]))
    return Feed(ports, members, seed, chosen, literals, Memory(max_bytes))


def _said(spec: str, ports: Mapping[str, Port]) -> dict[str, Array] | None:
    """The value that `name=0.5` gives an input; None where a file is meant. ValueError where it does not fit."""
    name, equals, text = spec.partition("=")
    number = literal(text) if equals and name in ports and not Path(spec).exists() and not Path(text).exists() else None
    if number is None:
        return None
    try:
        return {name: as_input(ports[name], number)}
    except ValueError as error:
        raise ValueError(f"input '{name}': {error}") from None


def _members(spec: str, ports: Mapping[str, Port]) -> dict[str, tuple[Path, str | None]]:
    """The inputs that one --input gives, by name; ValueError with the reason where it gives none."""
    name, equals, file = spec.partition("=")
    if equals and not Path(spec).exists():
        path = Path(file)
        if why := fault(path):
            raise ValueError(f"{file}: {why}, for input '{name}'")
        if path.suffix == ".npz":
            raise ValueError(f"{file}: an .npz holds several arrays; give it without '{name}='")
        return {name: (path, None)}
    path = Path(spec)
    if why := fault(path):
        raise ValueError(f"{spec}: {why}")
    if path.suffix == ".npy":
        if len(ports) == 1:
            return {next(iter(ports)): (path, None)}
        raise ValueError(f"{spec}: say which input it is, as in {next(iter(ports), 'name')}={spec}")
    try:
        return {name: (path, name) for name in Archive(path, Memory(0))}
    except BROKEN:
        raise ValueError(f"{spec}: it is no .npz file, or a broken one") from None


def _choice(names: Iterable[str]) -> str:
    listed = list(names)
    return f"; they are {', '.join(repr(name) for name in listed)}" if listed else "; it has none"


def describe(port: Port) -> str:
    """A port as messages write it: `tensor(float) [batch, 10]`."""
    return port.type if port.shape is None else f"{port.type} [{', '.join(map(str, port.shape))}]"


def choose_sizes(symbols: Mapping[str, SymbolRecord], given: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """A size for every symbol, the given one or the smallest, and what is wrong with those given."""
    problems = [
        f"--set {name}={given[name]}: no such symbol{_choice(symbols)}" for name in given if name not in symbols
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
    """The array as the runtime takes it: types that numpy's files cannot name come in a wide one."""
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
    values = generator.standard_normal(size=shape)
    if wanted.kind == "c":
        return (values + 1j * generator.standard_normal(size=shape)).astype(wanted)
    return values.astype(wanted).astype(element.numpy)
