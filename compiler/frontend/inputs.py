"""Reads the inputs of a module as a `model.py` declares them: the argument of `forward` that each feeds, its shape and its dtype.

A dim is an int, a name, None (it gets a name) or a Symbol. A Symbol's dim gets the name of the global variable that holds the
Symbol, else `<input>_dim_<axis>`. A Symbol with `unique=True` gives all its dims the same name, so they are equal; without it
each further dim gets a new name (`batch`, `batch_1`) and has the same constraints only. Dims of equal name are equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes  # noqa: F401, makes bfloat16 and its like known to numpy
import numpy as np
import onnx_ir as ir
from partc.compiler.dims.symbol import Symbol
from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import free_name

_HELP = 'write inputs = {"x": Input(["batch", 1, 28, 28], "float32")}, one entry for each argument of forward'


@dataclass(frozen=True)
class Spec:
    """An input of the graph; every dynamic dim has a name."""

    name: str
    dims: tuple[int | str, ...]
    dtype: ir.DataType


@dataclass
class DimNames:
    """Names the dims of inputs, and maps each name to the Symbol that constrains it."""

    globals: Mapping[str, object]
    reserved: set[str]
    symbols: dict[str, Symbol] = field(default_factory=dict)
    _seen: dict[int, str] = field(default_factory=dict)

    def name(self, dim: object, fallback: str) -> int | str:
        """Returns the dim as an int or a name. Raises TypeError or ValueError for an object that is not a dim."""
        match dim:
            case bool():
                raise TypeError(f"a dim is an int, a name or a Symbol, got {dim!r}")
            case int() | np.integer():
                if dim < 0:
                    raise ValueError(f"a dim is at least 0, got {dim}; a dynamic dim has a name, such as 'batch'")
                return int(dim)
            case str():
                if not dim:
                    raise ValueError("a dim's name is empty")
                named = self.globals.get(dim)
                if isinstance(named, Symbol):
                    self.symbols[dim] = named
                return dim
            case None:
                return free_name(fallback, self.reserved)
            case Symbol():
                if dim.unique and id(dim) in self._seen:
                    return self._seen[id(dim)]
                holders = (name for name, value in self.globals.items() if value is dim)
                name = free_name(next(holders, fallback), self.reserved)
                self._seen[id(dim)] = name
                self.symbols[name] = dim
                return name
        raise TypeError(f"a dim is an int, a name or a Symbol, got {dim!r} of type {type(dim).__name__}")


def specs(declared: Mapping[str, Input], names: DimNames, where: str) -> list[Spec]:
    """Returns the declared inputs in their order. Raises CompileError with all problems of their shapes and dtypes."""
    names.reserved |= {dim for entry in declared.values() for dim in entry.shape if isinstance(dim, str)}
    problems: list[Problem] = []
    declared_specs: list[Spec] = []
    for name, entry in declared.items():
        dims: list[int | str] = []
        for axis, dim in enumerate(entry.shape):
            try:
                dims.append(names.name(dim, f"{name}_dim_{axis}"))
            except (TypeError, ValueError) as error:
                problems.append(Problem(where, f"input '{name}', dim {axis}: {error}"))
        try:
            declared_specs.append(Spec(name, tuple(dims), data_type(entry.dtype)))
        except (TypeError, ValueError, KeyError):
            fact = f"input '{name}': unknown dtype {entry.dtype!r}"
            problems.append(Problem(where, fact, help="dtypes are written as in numpy: float32, int64, bool, bfloat16"))
    if problems:
        raise CompileError(problems)
    return declared_specs


def data_type(dtype: object) -> ir.DataType:
    """Returns ONNX's type for a dtype of numpy or ml_dtypes, or its name."""
    if isinstance(dtype, ir.DataType):
        return dtype
    if dtype in ("string", str):
        return ir.DataType.STRING
    return ir.DataType.from_numpy(np.dtype(dtype))  # type: ignore[call-overload]


def as_mapping(
    declared: object, forward: Callable[..., object], skip: int, where: str, in_order: bool = False
) -> dict[str, object]:
    """Maps arguments of `forward` to the inputs that feed them; the first `skip` parameters of `forward` are not inputs.

    A tuple or list is matched by position, and with `in_order` a dict too, whatever its names. Raises CompileError where names
    and parameters do not match.
    """
    parameters = list(inspect.signature(forward).parameters.values())[skip:]
    variadic = {p.kind for p in parameters} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    plain = [p for p in parameters if p.kind not in variadic]
    names = [p.name for p in plain]
    if isinstance(declared, list | tuple):
        if len(declared) > len(names):
            fact = f"inputs has {len(declared)} entries, but forward takes {len(names)}: {_listed(names)}"
            raise CompileError(Problem(where, fact, help=_HELP))
        declared = dict(zip(names, declared, strict=False))
    if not isinstance(declared, Mapping):
        fact = f"inputs is a dict of names, got {type(declared).__name__}"
        raise CompileError(Problem(where, fact, help=_HELP))
    mapping = {str(name): entry for name, entry in declared.items()}
    if in_order and len(mapping) == len(names):
        return mapping
    problems = [
        Problem(where, f"inputs names '{name}', but forward takes {_listed(names)}", help=_HELP)
        for name in mapping
        if name not in names and inspect.Parameter.VAR_KEYWORD not in variadic
    ]
    missing = [p.name for p in plain if p.default is p.empty and p.name not in mapping]
    if missing:
        problems.append(Problem(where, f"forward takes {_listed(missing)}, which inputs does not name", help=_HELP))
    if problems:
        raise CompileError(problems)
    return mapping


def as_input(entry: object) -> Input | None:
    """Converts an entry of `inputs`: an `Input` stays, a shape gets float32, an array gives its shape and dtype; None for anything else."""
    if isinstance(entry, Input):
        return entry if _is_shape(entry.shape) else None
    if isinstance(entry, np.ndarray):
        return Input(list(entry.shape), "string" if entry.dtype.kind in "OUS" else entry.dtype.name)
    if _is_shape(entry):
        assert isinstance(entry, Sequence)
        return Input(list(entry))
    return None


def all_inputs(given: Mapping[str, object], where: str) -> dict[str, Input]:
    """Converts every entry to an `Input`. Raises CompileError that lists all entries that cannot be converted."""
    read = {name: as_input(entry) for name, entry in given.items()}
    problems = [
        Problem(where, f"input '{name}' is {given[name]!r}, which is neither an Input nor a shape", help=_HELP)
        for name, entry in read.items()
        if entry is None
    ]
    if problems:
        raise CompileError(problems)
    return {name: entry for name, entry in read.items() if entry is not None}


def _is_shape(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no input"
