"""The command `partc ops`: how each op can be sharded, whether it has a gradient, and how much of the standard is covered."""

from __future__ import annotations

import fnmatch
import json
from typing import TYPE_CHECKING

import click
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.compiler.ops.registry import Entry

OPSET = 23


@click.command()
@click.argument("patterns", nargs=-1, metavar="[OP...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(patterns: tuple[str, ...], as_json: bool) -> int:
    """Show how each op can be sharded: all ops, or those that match one of the names.

    A letter is a factor: sharding it shards every dim that has it. A contracted factor is in no output: sharding it makes the
    output partial, a term of a sum unless another reduction is named. `*` is any number of corresponding dims, `.` is one dim, and
    `_` any number of dims, that are replicated. linear: inputs that may be partial, with the outputs partial then, each by itself
    (a product) or jointly (a sum). gradient: `yes` if the op has one, `stops` if its output is piecewise constant.

    \b
    partc ops                              # the whole table
    partc ops MatMul 'Reduce*'             # some ops
    """
    from partc.compiler.ops.registry import entries, standard_ops

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
                "factors": one.notation.factors,
                "contracted": dict(one.notation.contracted),
                "replicated": one.notation.replicated,
                "linear": one.notation.linear,
                "partial": None if one.notation.partial is None else list(one.notation.partial),
                "shardable": one.notation.shardable,
                "gradient": _gradient(one),
                "precision": one.precision,
                "kernel": one.work.kernel,
                "why": one.notation.why,
                "remarks": one.notation.remarks,
            }
            for one in chosen
        ]
        console.echo(json.dumps(rows, indent=1))
        return 0
    table = Table(["op", "factors", "contracted", "replicated", "linear", "gradient", "precision", "remarks"])
    for op_entry in chosen:
        table.add(
            op_entry.name,
            op_entry.notation.factors or "-",
            op_entry.notation.reductions,
            op_entry.notation.replicated or ("" if op_entry.notation.shardable else "all"),
            op_entry.notation.linearity,
            _gradient(op_entry),
            op_entry.precision,
            op_entry.notation.why or op_entry.notation.remarks,
        )
    table.show()
    if not patterns:
        standard = set(standard_ops(OPSET))
        there = [one for one in entries() if one.domain == "" and one.op_type in standard]
        shardable = sum(one.notation.shardable for one in there)
        differentiable = sum(one.differentiable for one in there)
        console.echo(
            f"\nai.onnx, opset {OPSET}: {len(standard)} ops, {len(there)} with an entry, {shardable} of them shardable, "
            f"{differentiable} with a gradient"
        )
    return 0


def _gradient(entry: Entry) -> str:
    """`yes` if the op has a gradient, `stops` if it is zero everywhere, empty if there is no rule."""
    return "yes" if entry.differentiable else "stops" if entry.stops_gradient else ""
