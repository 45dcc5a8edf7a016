"""Records of what the numbers of a tensor may be, or are: labels, ids of rows, first values."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Law(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


class LabelRecord(_Law):
    """The numbers that an input of labels may have: 0 to `classes` - 1 (0: known only at run time), and the `ignored` ones.

    `metric`: the one that takes no others, where a loss may.
    """

    classes: int = Field(0, ge=0)
    ignored: list[int] = []
    metric: str = ""


class IdsRecord(_Law):
    """The ids of an input: those at `places` along `axis`, or everywhere if none are given, name one of the `rows` of a `table`."""

    table: str
    rows: int = Field(ge=1)
    axis: int = Field(0, ge=0)
    places: list[int] = []


class Law(_Law):
    """First values by element: `offset + factor * d`, d by `draw` from the `stream` (`tensors/law.py`); rows in `zero_rows` are zeros."""

    draw: Literal["constant", "uniform", "normal", "truncated_normal"]
    stream: str = ""
    offset: float = 0.0
    factor: float = 1.0
    zero_rows: tuple[int, ...] = ()
