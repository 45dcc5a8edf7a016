"""The names that values get when files are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from partc.compiler.emit.names import Names
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Body, Call, RankProgram, Value, added


def test_values_that_two_bodies_of_a_file_make_have_different_names() -> None:
    """The row has `h.0` of the microbatch 0 of each of them."""
    x, first, second, given, made = (Value(hint) for hint in ("x", "h", "h", "y", "z"))
    bodies = [
        Body(0, "F", (x,), (given,), (added("Relu", [x], [first]), added("Exp", [first], [given]))),
        Body(0, "B", (given,), (made,), (added("Neg", [given], [second]), added("Abs", [second], [made]))),
    ]
    calls = tuple(Call(body, 0, body.inputs, body.outputs) for body in bodies)
    part = RankProgram(0, calls, (), (), ())
    names = Names(cast(Complete, cast(Any, SimpleNamespace(distinct_programs=[(part, (0,))]))))
    assert [names[value] for value in (x, first, second, given, made)] == ["x", "h", "h'", "y", "z"]
