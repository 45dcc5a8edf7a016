"""The command `partc ops`: the table of ops, how each may be cut, whether it has a gradient, and how much of the standard it covers."""

from __future__ import annotations

import fnmatch
import json
from typing import TYPE_CHECKING

import click
from partc.cli.output import say
from partc.cli.output.present import Table

if TYPE_CHECKING:
    from partc.compiler.ops.registry import Entry

OPSET = 23


@click.command()
@click.argument("patterns", nargs=-1, metavar="[OP...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(patterns: tuple[str, ...], as_json: bool) -> int:
    """Show how each op may be cut: all of them, or those that match one of the names.

    A letter is a factor: cutting it cuts every dim that has it. A contracted factor is in no output: a cut of it leaves
    terms of a sum, or of what is named. `*` is any dims that correspond, `.` is a dim and `_` are dims that stay
    whole. Training goes through ops whose gradient is `yes`; it `stops` at those whose output does not follow small
    changes.

    \b
    partc ops                              # the whole table
    partc ops MatMul 'Reduce*'             # some ops
    """
    import partc.compiler.ops.families  # noqa: F401
    from partc.compiler.ops.registry import entries, standard_ops
    from partc.runtime.errors import UsageError

    chosen = [
        entry
        for entry in entries()
        if not patterns or any(fnmatch.fnmatch(name, one) for one in patterns for name in (entry.op_type, entry.name))
    ]
    if not chosen:
        raise UsageError(f"no op matches {' or '.join(map(repr, patterns))}; `partc ops` lists them all")
    if as_json:
        rows = [
            {
                "domain": one.domain,
                "op": one.op_type,
                "factors": one.factors,
                "contracted": one.contracted,
                "whole": one.whole,
                "remarks": one.remarks,
                "cuttable": one.cuttable,
                "gradient": _gradient(one),
            }
            for one in chosen
        ]
        say.echo(json.dumps(rows, indent=1))
        return 0
    table = Table(["op", "factors", "contracted", "whole", "gradient", "remarks"])
    for one in chosen:
        table.add(
            one.name,
            one.factors or "-",
            one.contracted,
            one.whole or ("" if one.cuttable else "all"),
            _gradient(one),
            one.remarks,
        )
    table.show()
    if not patterns:
        standard = set(standard_ops(OPSET))
        there = [one for one in entries() if one.domain == "" and one.op_type in standard]
        cuttable = sum(one.cuttable for one in there)
        differentiable = sum(one.differentiable for one in there)
        say.echo(
            f"\nai.onnx, opset {OPSET}: {len(standard)} ops, {len(there)} with an entry, {cuttable} of them cuttable, "
            f"{differentiable} with a gradient"
        )
    return 0


def _gradient(entry: Entry) -> str:
    """`yes` where a gradient flows back through the op, `stops` where it is known to be nothing, empty where there is no rule."""
    return "yes" if entry.differentiable else "stops" if entry.stops else ""
