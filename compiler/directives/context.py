"""Options of MindSpore's contexts (`set_context`, `set_auto_parallel_context`) as globals of a `model.py`.

`dataset_strategy` and `full_batch` are followed (`plan/dataset.py`). Each of the others is told with what says it here:

    device_num = 8      model.py:3: device_num = 8 is not followed: `ranks` of the plan says how many ranks there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

_DERIVED = "shards are given by `sharding` of the plan or by `shard`, and all others derived from them"
_MEAN = "a loss is a mean or sum over the whole batch (`loss: {reduction: ...}`), and its gradient that of the unsharded model"
_BUCKETS = "`train: {bucket_mb: ...}` says how gradients are reduced together"
_CHECKPOINTS = "`partc train --checkpoint`, `--resume` and `--init` read and write checkpoints, for any plan"
INSTEAD = {
    "parallel_mode": _DERIVED,
    **dict.fromkeys(("search_mode", "auto_parallel_search_mode", "strategy_search_mode"), _DERIVED),
    "device_num": "`ranks` of the plan says how many ranks there are",
    "global_rank": "the launcher gives each process its rank",
    "device_target": "`target` of the plan, or `--device`, says the kind of device",
    "device_id": "a rank takes the device of its number on its host; `--device cuda:1` names another",
    "pipeline_stages": "`pipeline: {stages: ...}` or `placement` of the plan gives the stages",
    "grad_accumulation_step": "write `train: {accumulate: ...}` in the plan",
    **dict.fromkeys(("gradients_mean", "loss_repeated_mean"), _MEAN),
    "enable_parallel_optimizer": "write `train: {optimizer: {shard: true}}` in the plan",
    "parallel_optimizer_config": "write `train: {optimizer: {shard: true}}` in the plan",
    **dict.fromkeys(("all_reduce_fusion_config", "comm_fusion"), _BUCKETS),
    "parameter_broadcast": "each rank reads its weights from the artifact, so replicas begin equal",
    **dict.fromkeys(("strategy_ckpt_config", "strategy_ckpt_load_file", "strategy_ckpt_save_file"), _CHECKPOINTS),
    "group_ckpt_save_file": _CHECKPOINTS,
    "max_device_memory": "`pipeline: {memory: ...}` of the plan bounds what a rank keeps",
    **dict.fromkeys(
        ("save_graphs", "save_graphs_path"), "`partc compile` writes `ir/`, and with --dump-ir a text for each pass"
    ),
}
"""By option what says it here."""


def not_followed(options: Mapping[str, object], line: Callable[[str], str]) -> Iterator[str]:
    """A warning for each global that is such an option; `line` gives where one is defined."""
    for name, reason in INSTEAD.items():
        given = options.get(name)
        if isinstance(given, str | int | float | list | dict):
            yield f"{line(name)}: {name} = {given!r} is not followed: {reason}"
