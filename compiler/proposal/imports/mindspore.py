"""MindSpore's strategy files, as `strategy_ckpt_config={"save_file": "strategy.json"}` writes them, one for each pipeline stage.

    {"current_stage": 0,
     "parallel_strategy_item": {"MatMul_layers.0.dense.weight": {"stage": 0, "parallel_strategy": [[2, 4], [4, 1]]}},
     "parallel_layout_item": {"layers.0.dense.weight": {"dev_matrix": [2, 4], "tensor_map": [0, -1], "tensor_shape": [64, 32], ...}}}

An operator's name is its kind and the parameter that it reads; its strategy has the number of shards of each dim of each input, as
`in` of a rule of `sharding` has. Layouts follow from strategies: of them the shapes are read, and the sharding of an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from partc.compiler.errors import CompileError, Problem
from partc.compiler.proposal.imports.imported import Imported, Strategy

STRATEGIES, LAYOUTS = "parallel_strategy_item", "parallel_layout_item"


def read_mindspore(files: Sequence[tuple[str, Mapping[str, object]]], source: str) -> Imported:
    """The strategies of all files, by name and content. CompileError where an item is not as MindSpore writes it."""
    problems: list[Problem] = []
    strategies: dict[str, Strategy] = {}
    left: list[str] = []
    ranks = 0
    for file, content in files:
        layouts = _layouts(content, file, problems)
        shapes = {name: tuple(layout.get("tensor_shape") or ()) for name, layout in layouts.items()}
        ranks = max([ranks, *(math.prod(layout.get("dev_matrix") or ()) for layout in layouts.values())])
        if any((layout.get("opt_weight_shard_size") or 0) > 1 for layout in layouts.values()):
            left.append(
                "optimizer state in shards (opt_weight_shard_size): write `optimizer: {shard: true}` in `train:`"
            )
        items = content.get(STRATEGIES) or {}
        if not isinstance(items, dict):
            problems.append(Problem(file, f"{STRATEGIES} does not map operators to strategies", help=_LAW))
            continue
        for name, item in items.items():
            stage, inputs = _strategy(item)
            op, _, weight = name.partition("_")
            if inputs is None:
                problems.append(Problem(file, f"'{name}' has no stage and list of strategies", help=_LAW))
            else:
                strategies[name] = Strategy(op, weight, inputs, stage, shapes.get(weight, ()))
    if problems:
        raise CompileError(problems)
    degrees = {"ranks": ranks} if ranks > 1 else {}
    return Imported(source, degrees, strategies=tuple(strategies.values()), ignored=tuple(dict.fromkeys(left)))


_LAW = "pass the .json that `strategy_ckpt_config` has written"


def _strategy(item: object) -> tuple[int, tuple[tuple[int, ...], ...] | None]:
    """The stage of an item and its strategies; None for these where they are not lists of numbers of shards."""
    if not isinstance(item, dict) or not isinstance(stage := item.get("stage", 0), int) or stage < 0:
        return 0, None
    lists = item.get("parallel_strategy")
    if not isinstance(lists, list) or not all(map(_is_list_of_sizes, lists)):
        return 0, None
    return stage, tuple(map(tuple, cast("list[list[int]]", lists)))


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and one > 0 for one in value)


def _layouts(content: Mapping[str, object], file: str, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The layouts of a file by parameter, those that MindSpore could have written."""
    layouts = content.get(LAYOUTS) or {}
    if not isinstance(layouts, dict):
        problems.append(Problem(file, f"{LAYOUTS} does not map parameters to layouts", help=_LAW))
        return {}
    sizes = ("tensor_shape", "dev_matrix")
    sound = {}
    for name, layout in layouts.items():
        if isinstance(layout, dict) and all(_is_list_of_sizes(layout.get(key) or []) for key in sizes):
            sound[name] = layout
        else:
            problems.append(Problem(file, f"the layout of '{name}' has no lists of sizes", help=_LAW))
    return sound
