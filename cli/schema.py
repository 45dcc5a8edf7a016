"""The command `partc schema`: the JSON schema of a plan, for editors and for other tools."""

from __future__ import annotations

import json

import click


@click.command()
def command() -> int:
    """Print the JSON schema of a plan.

    \b
    partc schema > plan.schema.json
    # then, as the first line of a plan:
    # yaml-language-server: $schema=plan.schema.json
    """
    from partc.compiler.plan.schema import plan_schema

    click.echo(json.dumps(plan_schema(), indent=2))
    return 0
