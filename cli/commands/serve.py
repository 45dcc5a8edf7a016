"""The command `partc serve`: a server of completions over an artifact whose plan generates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import WithLauncherOptions, place_options, start
from partc.cli.job.job import Job
from partc.cli.server.settings import ServerSettings
from partc.cli.text.tool_calls import FORMS
from partc.runtime.errors import reason_of
from partc.runtime.files import counted

_RESTARTS = 5
_KEY_BYTES = 4096


def _key(value: str | None) -> str | None:
    """The key that an option names; BadParameter where it is empty, or a header cannot have it."""
    if value is not None and value.startswith("@"):
        try:
            value = counted.read_text(Path(value[1:]), _KEY_BYTES).partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{value[1:]}: {reason_of(error)}") from None
    if value is not None and not re.fullmatch(r"[!-~]+", value):
        raise click.BadParameter("the key is empty, or has letters other than those of ASCII without spaces")
    return value


def _origins(values: Sequence[str]) -> Sequence[str]:
    """Origins of pages; BadParameter."""
    for value in values:
        if not re.fullmatch(r"\*|https?://[^/\s]+", value):
            raise click.BadParameter(
                f"'{value}' is not an origin, which is as https://chat.example or http://localhost:3000"
            )
    return values


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="The port on which it listens; 0: a free one.",
)
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    metavar="A",
    help="The address of this machine on which it listens; 0.0.0.0: all of them.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A further name by which clients call it; may be repeated. Without one localhost and its address are served.",
)
@click.option(
    "--served-model-name", metavar="NAME", help="The name by which clients call the model.  [default: the artifact's]"
)
@click.option(
    "--api-key",
    metavar="KEY|@FILE",
    callback=lambda ctx, option, value: _key(value),
    help="What clients send as `Authorization: Bearer KEY`; @FILE: the first line of a file, which no list of processes shows.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    callback=lambda ctx, option, value: _origins(value),
    help="A page's origin, as https://chat.example, whose scripts may use it, or *; may be repeated.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model's tokenizer.json, for text; its chat template is looked for beside it.",
)
@click.option(
    "--tool-calls",
    type=click.Choice([*FORMS]),
    help="The form in which the model writes calls of tools.  [default: as its chat template and tokenizer tell]",
)
@click.option(
    "--adapters",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with folders of adapters, which clients may load while it serves.",
)
@click.option(
    "--queue",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    metavar="N",
    help="How many requests may wait for a slot; a further one is answered with 429.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="A request ends after this time, if it does not name its own.",
)
@click.option(
    "--drain",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long open requests may go on after SIGTERM or Ctrl-C.",
)
@click.option(
    "--no-shared-prefixes",
    is_flag=True,
    help="Read each prompt whole. Without it the begin of a prompt that a slot has is copied: in the time of its answer a client can see "
    "whether others have sent it.",
)
@click.option("--restart", is_flag=True, help=f"Start the ranks again when one fails, {_RESTARTS} times at most.")
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, **chosen: Any) -> int:
    """Serve completions with the artifact in FOLDER (by default build), which was compiled by a plan with `generate`.

    Its API is OpenAI's: /v1/completions, /v1/chat/completions and /v1/responses, also as streams, /v1/embeddings and /v1/models;
    /health, /metrics for Prometheus, and a page at / to try it. Requests run at once in the artifact's slots.

    A connection has 10 s and 16 KiB for the head of a request, 30 s and 1 MB for its body; there are as many as slots
    and queue, and 128 more, and each takes 1.4 MB at most.

    \b
    partc serve --tokenizer llama/tokenizer.json
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    settings = ServerSettings(
        host=chosen["address"],
        port=chosen["port"],
        drain=chosen["drain"],
        queue=chosen["queue"],
        timeout=chosen["timeout"],
        tokenizer=None if chosen["tokenizer"] is None else str(chosen["tokenizer"].absolute()),
        hosts=chosen["allow_host"],
        origins=chosen["cors"],
        name=chosen["served_model_name"],
        api_key=chosen["api_key"],
        shares=not chosen["no_shared_prefixes"],
        tool_calls=chosen["tool_calls"],
        adapters=None if chosen["adapters"] is None else str(chosen["adapters"].absolute()),
        restart=_RESTARTS if chosen["restart"] else 0,
    )
    return start(ctx, folder, Job(folder=str(folder.absolute()), serving=settings), chosen)
