"""The commands about plans: `partc plan` writes a starting plan, `partc schema` prints the JSON schema of plans."""

from __future__ import annotations

from pathlib import Path

import click
from partc.cli.output import console


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan to this file."
)
@click.option(
    "--tp", type=click.IntRange(min=1), default=1, metavar="N", help="Propose tensor parallelism over N ranks."
)
@click.option("--dp", type=click.IntRange(min=1), default=1, metavar="N", help="Propose data parallelism over N ranks.")
@click.option("--stages", type=click.IntRange(min=1), default=1, metavar="N", help="Propose N stages of equal cost.")
def command(model: Path, out: Path | None, tp: int, dp: int, stages: int) -> int:
    """Write a starting plan for MODEL: its inputs, and its modules and parameters as comments.

    With --tp, --dp and --stages the plan has placement and sharding for the layers that partc recognizes, on TP * DP * STAGES ranks.

    \b
    partc plan model.onnx -o plan.yaml
    partc plan model.onnx --dp 2 --tp 4 -o plan.yaml
    """
    from partc.compiler.frontend import load
    from partc.compiler.frontend.names import node_paths
    from partc.compiler.proposal.propose import Degrees, propose
    from partc.compiler.proposal.starting_plan import starting_plan
    from partc.runtime.errors import UsageError
    from partc.runtime.files.replace import write_text

    if out is not None and out.exists():
        raise UsageError(f"{out}: the file exists already\n  help: choose another name with -o, or remove the file")
    source = load(model)
    degrees = Degrees(tp, dp, stages)
    if degrees.ranks > 1:
        text, missing = propose(source, model.name, degrees)
        for line in missing:
            console.echo(f"warning: not recognized: {line}", err=True)
    else:
        text = starting_plan(source.model, node_paths(source.model), model.name, source.declared.symbols)
    if out is None:
        console.echo(text, nl=False)
        return 0
    write_text(out, text)
    console.echo(f"wrote {out}")
    return 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a plan, for editors and other tools.

    \b
    partc schema > plan.schema.json
    # then, as the first line of a plan:
    # yaml-language-server: $schema=plan.schema.json
    """
    import json

    from partc.compiler.plan.schema import plan_schema

    console.echo(json.dumps(plan_schema(), indent=2))
    return 0
