"""Fields that the bodies of several requests have."""

from __future__ import annotations

import json
from typing import Annotated

from partc.runtime.generation.request import MOST_BIASES
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST_LABELS = 64
_MOST_STOPS, _MOST_STOP_LETTERS = 16, 256


class Strict(BaseModel):
    """A document whose fields have the types that they have in JSON, and that has no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _stops(value: object) -> object:
    """Returns the texts of `stop` as a list; raises ValueError if they are not texts, too many or too long."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise ValueError("is a text, or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"has {len(stops):,} texts; at most {_MOST_STOPS}")
    if sizes := [len(one) for one in stops if not 1 <= len(one) <= _MOST_STOP_LETTERS]:
        raise ValueError(f"has a text of {sizes[0]:,} letters; each has 1 to {_MOST_STOP_LETTERS}")
    return stops


def _biases(value: object) -> object:
    """Maps each token number to its bias; raises ValueError if there are too many, or a key is not the number of a token."""
    if not isinstance(value, dict):
        raise ValueError("is not a mapping from tokens to numbers")
    if len(value) > MOST_BIASES:
        raise ValueError(f"has {len(value):,} tokens; at most {MOST_BIASES:,}")
    if wrong := [name for name in value if not (isinstance(name, str) and name.isdecimal() and len(name) < 12)]:
        raise ValueError(f"has {json.dumps(wrong[0])[:80]}, which is not the number of a token")
    return {int(name): bias for name, bias in value.items()}


def _labels(value: object) -> object:
    """Returns the labels as they are; raises ValueError if there are more than `MOST_LABELS`, since a message lists each wrong label."""
    if isinstance(value, dict) and len(value) > MOST_LABELS:
        raise ValueError(f"has {len(value):,} labels; at most {MOST_LABELS:,}")
    return value


class Labels(Strict):
    """The model that is asked, how long it may take, and fields that change no answer."""

    model: str | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_labels)] | None = None


class Sampling(Strict):
    """How tokens are drawn, and texts that end them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops)] = None


SAMPLING = (*(name for name in Sampling.model_fields if name not in ("seed", "stop")),)
"""The fields of a body that are also options of a `Request`, under the same names."""
