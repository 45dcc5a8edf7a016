"""A manifest's JSON as one of its programs needs it, for tests that change it: the common fields beside the program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OWN = ("inputs", "outputs", "transfers", "collectives", "rank_files")


def edit(data: dict[str, Any], change: Callable[[dict[str, Any]], object], program: str = "") -> None:
    """Changes a manifest by the view of a program, by default the main one: there a state has its `next`, as in `Manifest`."""
    name = program or next(iter(data["programs"]))
    record = data["programs"][name]
    kept = record["kept"]
    others = [one for one in data["state"] if one["value"] not in kept]
    flat = {key: value for key, value in data.items() if key != "programs"} | {key: record[key] for key in OWN}
    flat["state"] = [{**one, "next": kept[one["value"]]} for one in data["state"] if one["value"] in kept]
    change(flat)
    own = {key: value for key, value in record.items() if key not in OWN}
    own |= {key: flat.pop(key) for key in OWN if key in flat}
    state = flat.get("state")
    if isinstance(state, list) and all(isinstance(one, dict) and {"value", "next"} <= one.keys() for one in state):
        own["kept"] = {one["value"]: one["next"] for one in state}
        flat["state"] = [*({key: value for key, value in one.items() if key != "next"} for one in state), *others]
    programs = {**data["programs"], name: own}
    data.clear()
    data.update({**flat, "programs": programs})
