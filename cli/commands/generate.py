"""The command `partc generate`: continues prompts with an artifact whose plan generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import WithLauncherOptions, place_options, start
from partc.cli.job.job import GenerationJob, Job
from partc.cli.job.prompts import OPTIONS
from partc.runtime.errors import UsageError


def _ids(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    prompts = []
    for text in given:
        words = text.replace(",", " ").split()
        if not words or not all(word.isdecimal() for word in words):
            raise click.BadParameter(f"'{text}' is not a list of tokens, such as 1,306,4658")
        prompts.append(tuple(map(int, words)))
    return tuple(prompts)


def _biases(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise click.BadParameter(f"'{text}' is not a token and a number, such as 306=-100") from None
        if not token.isdecimal():
            raise click.BadParameter(f"'{token}' is not a token, such as 306")
    return biases


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; may be repeated. Needs --tokenizer.")
@click.option("--ids", multiple=True, callback=_ids, metavar="1,306,...", help="A prompt as tokens; may be repeated.")
@click.option(
    "--features",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An encoder's input, a .npy file; may be repeated.",
)
@click.option(
    "--decoder-ids",
    multiple=True,
    callback=_ids,
    metavar="3,5,...",
    help="Tokens with which a decoder behind an encoder begins; by default the model's.",
)
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='A file of JSON lines, {"prompt": "Once"} or {"ids": [1, 306], "max_tokens": 20, "temperature": 0.8}.',
)
@click.option(
    "--tokenizer", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The model's tokenizer.json."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="The most tokens of an answer; by default what fits, at most 128.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="0: the likeliest token; else tokens are drawn. As other options by default the artifact's 'defaults'.",
)
@click.option("--top-k", type=click.IntRange(min=0), metavar="K", help="Draw of the K likeliest tokens; 0: of all.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="P",
    help="Draw of the fewest tokens whose probabilities reach P.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(min=0, max=1),
    metavar="P",
    help="Draw of tokens with P times the largest probability.",
)
@click.option("--repetition-penalty", type=float, metavar="R", help="Divides logits of tokens that are there already.")
@click.option("--presence-penalty", type=float, metavar="R", help="Subtracted from logits of tokens of the answer.")
@click.option("--frequency-penalty", type=float, metavar="R", help="The same, for each time that a token is there.")
@click.option(
    "--logit-bias",
    multiple=True,
    callback=_biases,
    metavar="TOKEN=BIAS",
    help="Added to a token's logit; may be repeated.",
)
@click.option("--min-tokens", type=click.IntRange(min=0), metavar="N", help="No end before N tokens.")
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Answers of a file or as JSON have logarithms of probabilities, with those of N likely tokens.",
)
@click.option("--adapter", metavar="NAME", help="The adapter of the plan that is added to the model; by default none.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="S", help="What is drawn follows from it alone.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the answers to this file, as JSON lines in the order of the prompts.",
)
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, **chosen: Any) -> int:
    """Continue prompts with the artifact in FOLDER (by default build), which was compiled by a plan with `generate`.

    One answer is printed as it is made; of several prompts each answer is a line of JSON when it ends. They run at once in the artifact's
    slots.

    \b
    partc generate --ids 1,306,4658 --max-tokens 50
    partc generate --prompt "Once upon a time" --tokenizer llama/tokenizer.json
    partc generate build --features speech.npy --decoder-ids 50258,50259,50359
    partc generate build --prompts prompts.jsonl --temperature 0.8 --seed 7
    """
    own = [key for key in ("texts", "ids", "features", "decoder_ids") if chosen[key]]
    if not (chosen["file"] or [key for key in own if key != "decoder_ids"]):
        raise UsageError("no prompt is given\n  help: give --prompt, --ids, --features or --prompts")
    if chosen["file"] and own:
        raise UsageError(
            "--prompts has all prompts\n  help: leave out the other options of prompts, or put them into the file"
        )
    if len(chosen["decoder_ids"]) > 1:
        raise UsageError(
            "--decoder-ids is given twice\n  help: give it once, or write 'decoder_ids' in a file of --prompts"
        )
    options = {key: chosen[key] for key in OPTIONS if chosen[key] not in (None, {})}
    generation = GenerationJob(
        texts=chosen["texts"],
        ids=chosen["ids"],
        features=tuple(str(path.absolute()) for path in chosen["features"]),
        decoder_ids=next(iter(chosen["decoder_ids"]), ()),
        file=None if chosen["file"] is None else str(chosen["file"].absolute()),
        tokenizer=None if chosen["tokenizer"] is None else str(chosen["tokenizer"].absolute()),
        output=None if chosen["output"] is None else str(chosen["output"].absolute()),
        options=options,
    )
    return start(ctx, folder, Job(folder=str(folder.absolute()), generation=generation), chosen)
