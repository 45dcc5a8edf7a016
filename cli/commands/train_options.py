"""Options that are keys of a plan's `train:`: what they may be, and their help, are those of the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from partc.runtime.artifact.training.data_spec import data_of_words
from partc.runtime.artifact.training.train_settings import CheckpointSettings, LoopSettings
from partc.runtime.options import refusals
from pydantic import ValidationError

Command = TypeVar("Command", bound=Callable[..., Any])

_OF_CHECKPOINTS = {"checkpoint": "folder", "save": "every", "keep": "keep"}
"""By option the key of `checkpoint` that it gives."""


class _Key(click.ParamType[Any]):
    """The value of a key of `train:`, as a plan may have it."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None
        assert param.name is not None
        number = int(value) if isinstance(value, str) and value.removeprefix("-").isdecimal() else value
        try:
            LoopSettings.model_validate(settings_of({param.name: number}))
        except ValidationError as error:
            self.fail("; ".join(refused.fact for _, refused, _ in refusals(error)), param, ctx)
        return number


def setting(
    option: str, metavar: str, type: click.ParamType[Any] | None = None, help: str | None = None
) -> Callable[[Command], Command]:
    """The option `--batch` for the key `batch`."""
    model: Any = CheckpointSettings if option in _OF_CHECKPOINTS else LoopSettings
    help = help or model.model_fields[_OF_CHECKPOINTS.get(option, option)].description
    return click.option(f"--{option.replace('_', '-')}", type=type or _Key(), metavar=metavar, help=help)


def data_option(option: str, help: str) -> Callable[[Command], Command]:
    """The option `--data`, which says what the key `data` may say."""
    return click.option(f"--{option}", multiple=True, metavar="PATH|INPUT=PATH", help=help)


only_option = click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Take from --init the weights alone that a plan's pattern matches, such as '**.lora_*'; it may be repeated.",
)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `train:` that options give, paths made absolute; UsageError for words of `--data` that say nothing."""
    said: dict[str, Any] = {}
    for option, value in given.items():
        if value is None or value == ():
            continue
        if option in ("data", "test"):
            said[option] = data_of_words(value, Path.cwd(), f"--{option}").model_dump(mode="json")
        elif option in _OF_CHECKPOINTS:
            absolute = str(value.absolute()) if isinstance(value, Path) else value
            said.setdefault("checkpoint", {})[_OF_CHECKPOINTS[option]] = absolute
        elif option in LoopSettings.model_fields:
            said[option] = value
    return said
