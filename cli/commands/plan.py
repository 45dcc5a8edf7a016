"""The commands about plans: `partc plan` writes one to start from, `partc schema` says what one may hold."""

from __future__ import annotations

from pathlib import Path

import click
from partc.cli.output import say


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Propose cuts of every layer over so many ranks.")
@click.option("--dp", type=click.IntRange(min=1), default=1, help="Propose to cut the batch over so many ranks.")
@click.option("--stages", type=click.IntRange(min=1), default=1, help="Propose so many stages of equal weight.")
def command(model: Path, out: Path | None, tp: int, dp: int, stages: int) -> int:
    """Write a plan for MODEL to edit: its inputs, and its modules and parameters as comments.

    With --tp, --dp and --stages it proposes placement and cuts for what it recognizes; they multiply to the number of ranks.

    \b
    partc plan model.onnx -o plan.yaml
    partc plan model.onnx --dp 2 --tp 4 -o plan.yaml
    """
    from partc.compiler.frontend import load
    from partc.compiler.frontend.names import node_paths
    from partc.compiler.plan.start import starting_plan
    from partc.compiler.proposal.propose import Degrees, propose
    from partc.runtime.errors import UsageError
    from partc.runtime.files.replace import write_text

    if out is not None and out.exists():
        raise UsageError(f"{out}: there is such a file already\n  help: give another name with -o, or remove it")
    source = load(model)
    degrees = Degrees(tp, dp, stages)
    if degrees.ranks > 1:
        text, missing = propose(source, model.name, degrees)
        for line in missing:
            say.echo(f"warning: not recognized: {line}", err=True)
    else:
        text = starting_plan(source.model, node_paths(source.model), model.name, source.declared.symbols)
    if out is None:
        say.echo(text, nl=False)
        return 0
    write_text(out, text)
    say.echo(f"wrote {out}")
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

    say.echo(json.dumps(plan_schema(), indent=2))
    return 0
