"""Random plans for the networks of `torch_networks.py`: what is trained (`Task`), and where it runs (`Layout`); a task runs in any layout.

task, layout = drawn_task(chance, net), drawn_layout(chance, net, task)
layout.text(task)           the plan
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from torch import nn
from torch_networks import Network

WEIGHTS = [0.1, 3.0, 1.0, 0.5, 2.0, 0.25]
OPTIMIZERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.05, "weight_decay": 0.1}),
    ("momentum", {"lr": 0.1, "momentum": 0.9}),
    ("momentum", {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}),
    ("nesterov", {"lr": 0.05, "momentum": 0.8}),
    ("adagrad", {"lr": 0.05, "initial_accumulator": 0.1, "eps": 1e-3}),
    ("rmsprop", {"lr": 0.01, "eps": 1e-2}),
    ("rmsprop", {"lr": 0.01, "eps": 1e-1, "momentum": 0.5, "centered": True, "weight_decay": 0.05}),
    ("adam", {"lr": 0.01, "eps": 1e-2, "betas": [0.8, 0.99]}),
    ("adam", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
    ("adamw", {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}),
    ("adamw", {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.01}),
    ("adafactor", {"lr": 0.02, "d": 2.0}),
)
"""Of each its numbers as torch.optim has them, too; `eps` is large, so that rounding alone moves nothing."""


@dataclass(frozen=True)
class Task:
    """What is trained: everything of the plan that numbers depend on."""

    loss: dict[str, object]
    optimizer: str
    options: dict[str, object]
    schedule: dict[str, object] | None = None
    clip: dict[str, float] | None = None
    parameters: dict[str, dict[str, object]] = field(default_factory=dict)
    """By the name of a parameter what is its own."""
    parts: int = 1
    """Into how many microbatches a batch is divided."""
    shares: int = 1
    """How many data parallel ranks have records of a batch; 1 where no number depends on it."""
    precision: dict[str, object] | None = None
    sizes: tuple[int, ...] = (12, 12, 12)
    """The records of each step."""
    lengths: tuple[int, ...] = (6, 6, 6)
    empty: int = 0
    """How many records of a batch, the first ones, have ignored labels alone."""
    scales: tuple[float, ...] = (1.0, 1.0, 1.0)
    """What the inputs of a step are multiplied by."""

    @property
    def labels(self) -> str:
        """The input that the loss compares with."""
        return str(self.loss.get("labels", self.loss.get("target")))


@dataclass(frozen=True)
class Layout:
    """Where a task runs."""

    ranks: int
    lines: list[str]
    pipeline: str = ""
    zero: str = ""
    state: str = ""
    """Where the optimizer is: a target, or nothing."""
    bucket: str = ""

    def text(self, task: Task) -> str:
        """The plan."""
        lines = [f"ranks: {self.ranks}", *self.lines]
        if self.pipeline:
            lines.append(f"pipeline: {{{self.pipeline}}}")
        if task.precision:
            lines.append(f"precision: {written(task.precision)}")
        own = {"type": task.optimizer, **task.options}
        own |= {"shard": self.zero} if self.zero else {}
        own |= {"target": self.state} if self.state else {}
        lines += ["train:", f"  loss: {written(task.loss)}", f"  optimizer: {written(own)}"]
        if task.parts > 1 and not self.pipeline:
            lines.append(f"  accumulate: {task.parts}")
        lines += [f"  {key}: {written(one)}" for key, one in (("schedule", task.schedule), ("clip", task.clip)) if one]
        if task.parameters:
            lines.append(f"  parameters: {written(task.parameters)}")
        return "\n".join([*lines, self.bucket, ""])


def written(one: object) -> str:
    """YAML in one line."""
    match one:
        case dict():
            return "{" + ", ".join(f"{_key(key)}: {written(value)}" for key, value in one.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(written(value) for value in one) + "]"
        case bool():
            return str(one).lower()
        case float():
            text = repr(one)
            return text if "e" not in text else f"{one:.12f}".rstrip("0")
    return str(one)


def _key(key: object) -> str:
    text = str(key)
    return f'"{text}"' if set(text) & set("*{}[]") else text


def drawn_task(chance: random.Random, net: Network) -> Task:
    """The training that chance says."""
    precision = _precision(chance, net) if chance.random() < 0.12 else None
    shares = chance.choice([1, 1, 2, 3]) if net.statistics or chance.random() < 0.15 else 1
    parts = chance.choice([1, 1, 1, 2, 2, 3, 4])
    loss = _loss(chance, net)
    if shares > 1 and "ignore_index" not in loss and not net.statistics:
        loss["reduction"] = "sum_over_ranks"
    kind, options = chance.choice(OPTIMIZERS)
    if kind == "adafactor" and (net.statistics or net.double is False):
        kind, options = OPTIMIZERS[0]
    options = dict(options)
    if loss.get("reduction", "mean") != "mean" and kind in ("sgd", "momentum", "nesterov"):
        options["lr"] = float(options["lr"]) / 50  # type: ignore[arg-type]
    count = chance.choice([3, 3, 4])
    unit = 6 * parts  # divisible by as many parts on one, two or three ranks
    sizes = tuple(unit * chance.choice([1, 1, 2]) for _ in range(count))
    lengths = tuple(chance.choice([5, 6, 6, 7]) for _ in range(count)) if net.length else (6,) * count
    empty = chance.choice([0, 0, unit // parts]) if "ignore_index" in loss and parts > 1 else 0
    schedule = chance.choice(
        [
            None,
            None,
            {"type": "step", "every": 2, "factor": 0.5},
            {"type": "cosine", "steps": 6, "minimum": float(options["lr"]) / 4},  # type: ignore[arg-type]
            {"type": "linear", "steps": 5},
        ]
    )
    clip = chance.choice([None, None, None, {"norm": 0.05}, {"norm": 0.5}, {"value": 0.01}])
    scales = (1.0,) * count
    if precision and precision["compute"] == "float16" and net.x and chance.random() < 0.5:
        scales = tuple(1e6 if k == 1 else 1.0 for k in range(count))
    parameters = _parameters(chance, net, kind, precision)
    return Task(
        loss, kind, options, schedule, clip, parameters, parts, shares, precision, sizes, lengths, empty, scales
    )


def _precision(chance: random.Random, net: Network) -> dict[str, object] | None:
    if net.double:
        return None
    compute = chance.choice(["float16", "bfloat16"])
    scale: object = chance.choice([64, "dynamic", {"first": 1024, "growth": 2, "backoff": 0.5, "interval": 2}])
    return {"compute": compute, "loss_scale": scale if compute == "float16" else "none"}


def _loss(chance: random.Random, net: Network) -> dict[str, object]:
    kind = chance.choice(["cross", "cross", "cross", "square", "absolute", "binary"])
    if kind == "cross":
        found: dict[str, object] = {"type": "softmax_cross_entropy", "logits": "y", "labels": "label"}
        if net.length:
            found["axis"] = 2
        if chance.random() < 0.5:
            found["ignore_index"] = -1
        if chance.random() < 0.4:
            found["weights"] = [WEIGHTS[k % len(WEIGHTS)] for k in range(net.classes)]
        if chance.random() < 0.3:
            found["label_smoothing"] = 0.1
    elif kind == "binary":
        found = {"type": "binary_cross_entropy", "logits": "y", "labels": "ones"}
        if chance.random() < 0.4:
            found["pos_weight"] = [2.5] if chance.random() < 0.5 else [0.5 + 0.25 * k for k in range(net.classes)]
    else:
        found = {"type": "mean_squared" if kind == "square" else "l1", "prediction": "y", "target": "t"}
    if chance.random() < 0.1:
        found["reduction"] = "sum"
    return found


def _parameters(
    chance: random.Random, net: Network, kind: str, precision: dict[str, object] | None
) -> dict[str, dict[str, object]]:
    names = [name for name, _ in net.module.named_parameters()]
    found: dict[str, dict[str, object]] = {}
    if chance.random() < 0.6:
        for name in chance.sample(names, min(len(names), chance.randint(1, 3))):
            kinds = ["lr", "staleness", "frozen", "optimizer"]
            if kind not in ("adafactor",):
                kinds.append("weight_decay")
            match chance.choice(kinds):
                case "lr":
                    found[name] = {"lr": 0.25}
                case "staleness" if precision is None:
                    found[name] = {"staleness": chance.choice([1, 2])}
                case "frozen":
                    found[name] = {"frozen": True}
                case "weight_decay":
                    found[name] = {"weight_decay": 0.2}
                case "optimizer":
                    other, options = chance.choice([one for one in OPTIMIZERS if one[0] != "adafactor"])
                    found[name] = {"optimizer": {"type": other, **options}}
    trained = [name for name in names if not found.get(name, {}).get("frozen")]
    return found if trained else {}


def drawn_layout(chance: random.Random, net: Network, task: Task) -> Layout:
    """A layout that chance says, in which the numbers of a task are the same."""
    if task.shares > 1:
        modes = ["dp", "dp", "dp_tp", "pp_dp"]
    elif task.loss.get("reduction") == "sum_over_ranks":
        modes = ["one", "tp", "place"]
    else:
        modes = ["one", "tp", "tp", "place", "stages", "stages", "stages", "pp_tp", "tp3"]
        if not net.statistics or task.parts == 1:
            modes += ["dp", "dp", "dp3", "dp_tp", "pp_dp", "pp_dp"]
        if net.words:
            modes += ["served", "pulled", "served", "pulled"]
    return _layout(chance, net, task, chance.choice(modes))


def _layout(chance: random.Random, net: Network, task: Task, mode: str) -> Layout:
    dp = task.shares if task.shares > 1 else 3 if mode == "dp3" else 2
    stages = chance.choice([2, 2, 3, 4])
    mesh: dict[str, int] = {}
    if mode in ("stages", "pp_dp", "pp_tp"):
        stages = min(stages, len(net.blocks), 4 if mode == "stages" else 2)
        mesh["pp"] = stages
    if mode in ("dp", "dp3", "dp_tp", "pp_dp", "served", "pulled"):
        mesh["dp"] = dp
    if mode in ("tp", "tp3", "dp_tp", "pp_tp"):
        mesh["tp"] = 3 if mode == "tp3" else 2
    ranks = 1
    for size in mesh.values():
        ranks *= size
    lines = []
    if mode == "place":
        ranks = chance.choice([2, 3, 4])
        lines.append(f"placement: {written({one: chance.randrange(ranks) for one in net.blocks})}")
    if mode == "served":
        lines.append(f"roles: {{ps: {list(range(ranks, ranks + 2))}}}")
        tables = [name for name in net.layers(nn.Embedding) if chance.random() < 0.7] or [*net.layers(nn.Embedding)][:1]
        lines.append(f"placement: {written({name: {'role': 'ps'} for name in tables})}")
        ranks += 2
    unit = max(1, mesh.get("dp", 1)) * task.parts
    lines.insert(0, f"symbols: {{batch: {{divisor: {unit}}}{', seq: {max: 8}' if net.length else ''}}}")
    if len(mesh) > 1 or (mesh and chance.random() < 0.7):
        lines.append(f"mesh: {written(mesh)}")
    pipeline = _pipeline(chance, net, task, mode, stages, lines) if "pp" in mesh else ""
    if "dp" in mesh:
        names = [*net.inputs, task.labels]
        dims = {"x": 1 + len(net.x), "ids": 2, "label": 1 + bool(net.length), "t": 2 + bool(net.length)}
        dims["ones"] = dims["t"]
        by_name = {name: ["dp", *["null"] * (dims[name] - 1)] for name in names}
        alone = len(mesh) == 1 and chance.random() < 0.6
        lines.append(f"dataset: {'data_parallel' if alone or not _meshed(lines) else written(by_name)}")
    cuts = _cuts(chance, net, mesh.get("tp", 1), mode)
    if cuts:
        lines.append(f"sharding: {written(cuts)}")
    if "dp" in mesh and chance.random() < 0.4:
        lines += _stored(chance, net, task, _meshed(lines))
    zero = ""
    if chance.random() < 0.4:
        zero = "dp" if "dp" in mesh and _meshed(lines) else "true" if ranks > 1 and mode != "place" else ""
    state = _targets(chance, net, lines)
    if pipeline and task.parts == 1 and chance.random() < 0.5 and "stages" not in pipeline:
        pipeline = ""
    bucket = "  bucket_mb: 0.0004" if chance.random() < 0.2 else ""
    return Layout(ranks, lines, pipeline, zero, state, bucket=bucket)


def _stored(chance: random.Random, net: Network, task: Task, meshed: bool) -> list[str]:
    """The lines of parameters that data parallel ranks store in shards."""
    patterns = chance.choice([["**"], ["**"], ["b*"], [f"{{{','.join(net.blocks)}}}"], net.blocks[:2]])
    found: dict[str, dict[str, object]] = {}
    for pattern in patterns:
        axis = "dp" if meshed and chance.random() < 0.8 else True
        found[pattern] = {"stored": axis, **chance.choice([{}, {}, {"after_forward": "keep"}])}
    settings: dict[str, object] = {"ahead": 2} if chance.random() < 0.2 else {}
    if task.parts > 1:
        settings |= chance.choice([{}, {"reduce": "microbatch"}])
    return [f"parameters: {written(found)}", *([f"stored: {written(settings)}"] if settings else [])]


def _meshed(lines: list[str]) -> bool:
    return any(line.startswith("mesh:") for line in lines)


def _pipeline(chance: random.Random, net: Network, task: Task, mode: str, stages: int, lines: list[str]) -> str:
    form = chance.choice(["chain", "chain", "loop", "vee"]) if len(net.blocks) >= 2 * stages else "chain"
    order = list(range(stages)) + (list(range(stages)) if form == "loop" else [])
    order += list(range(stages))[::-1] if form == "vee" else []
    ends = sorted(chance.sample(range(1, len(net.blocks)), len(order) - 1))
    groups = [f"{k}" if mode == "stages" and not _meshed(lines) else f"{{pp: {k}}}" for k in range(stages)]
    named: list[list[str]] = [[] for _ in order]
    for k, block in enumerate(net.blocks):
        named[sum(end <= k for end in ends)].append(block)
    schedules = {"chain": ["1f1b", "zb_h1"], "loop": ["interleaved"], "vee": ["zbv"]}[form]
    schedule = chance.choice([*schedules, *schedules, "gpipe", "auto", ""])
    said = [f"microbatches: {task.parts}"]
    if schedule:
        said.append(f"schedule: {schedule}")
    if chance.random() < 0.4:
        said.append(
            "stages: ["
            + ", ".join(
                f"{{nodes: '{', '.join(one)}', on: {groups[at]}}}" for one, at in zip(named, order, strict=True)
            )
            + "]"
        )
    else:
        placed = ", ".join(f"{block}: {groups[at]}" for one, at in zip(named, order, strict=True) for block in one)
        lines.append(f"placement: {{{placed}}}")
    if net.statistics and task.parts > 1:
        said.append("statistics: microbatch")
    if chance.random() < 0.25:
        said.append(f"recompute: {chance.choice(['b*', 'b[0-1]', 'b1'])!r}")
    return ", ".join(said)


def _cuts(chance: random.Random, net: Network, tp: int, mode: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if tp > 1:
        for name, one in net.layers(nn.Linear).items():
            assert isinstance(one, nn.Linear)
            fits = [
                *(["colwise"] if one.out_features % tp == 0 else []),
                *(["rowwise"] if one.in_features % tp == 0 else []),
            ]
            if fits and chance.random() < 0.7:
                found[name] = chance.choice([*fits, *fits, "replicate"])
        for name, table in net.layers(nn.Embedding).items():
            assert isinstance(table, nn.Embedding)
            if chance.random() < 0.4:
                found[name] = chance.choice(
                    [
                        *(["colwise"] if table.embedding_dim % tp == 0 else []),
                        *(["embedding_rowwise"] if table.num_embeddings % tp == 0 else ["replicate"]),
                    ]
                )
    if mode == "pulled":
        for name in net.layers(nn.Embedding):
            if chance.random() < 0.7 and not (net.module.tied and name == "b0.words"):
                found[name] = "pull"
    return found


def _targets(chance: random.Random, net: Network, lines: list[str]) -> str:
    if chance.random() < 0.7:
        return ""
    rules = {"**": "cuda"} if chance.random() < 0.6 else {}
    rules |= {
        one: chance.choice(["cpu", "cuda"]) for one in chance.sample(net.blocks, chance.randint(0, len(net.blocks)))
    }
    if rules:
        lines.append(f"target: {written(rules)}")
    return chance.choice(["", "cpu", "cuda"])
