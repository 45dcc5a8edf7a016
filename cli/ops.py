"""The command `partc ops`: the table of ops, how each may be cut, and how much of the standard it covers."""

from __future__ import annotations

import fnmatch
import json

import click
from partc.cli.present import Table

OPSET = 23


@click.command()
@click.argument("patterns", nargs=-1, metavar="[OP...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(patterns: tuple[str, ...], as_json: bool) -> int:
    """Show how each op may be cut: all of them, or those that match one of the names.

    A letter is a factor: cutting it cuts every dim that has it. A contracted factor is in no output: a cut of it leaves
    terms of a sum, or of what is named. `*` is any dims that correspond, `.` is a dim and `_` are dims that stay
    whole.

    \b
    partc ops                              # the whole table
    partc ops MatMul 'Reduce*'             # some ops
    """
    import partc.compiler.ops  # noqa: F401
    from partc.compiler.ops.table import entries, standard_ops
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
            }
            for one in chosen
        ]
        click.echo(json.dumps(rows, indent=1))
        return 0
    table = Table(["op", "factors", "contracted", "whole", "remarks"])
    for one in chosen:
        table.add(
            one.name, one.factors or "-", one.contracted, one.whole or ("" if one.cuttable else "all"), one.remarks
        )
    table.show()
    if not patterns:
        standard = set(standard_ops(OPSET))
        there = [one for one in entries() if one.domain == "" and one.op_type in standard]
        cuttable = sum(one.cuttable for one in there)
        click.echo(
            f"\nai.onnx, opset {OPSET}: {len(standard)} ops, {len(there)} with an entry, {cuttable} of them cuttable"
        )
    return 0
