"""Random stages, schedules and plans: a batch as microbatches on in-process ranks learns what one rank learns of it whole.

    python tests/fuzz/random_pipelines.py --cases 500 --seed 1
    python tests/fuzz/random_pipelines.py --case 17 --seed 1       one, with its model and its plan

A case is a network of `staged_networks.py`, its nodes on stages (a chain, a loop, a V, any DAG; by placement or named) of one rank or two
(tensor parallel, data parallel, ZeRO), a schedule by name or as rows, a limit of memory, what is recomputed, a loss and an optimizer, what
some parameters have of their own; a few take statistics of microbatches, as one rank then does, too. Two steps must give the losses and
all tensors that one rank gives without microbatches, in float32 or, where rounding is larger there, in float64, and `partc check` must
accept the artifact. What is refused is counted by its reason.
"""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pool
from partc.compiler.errors import CompileError
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import PartcError
from staged_networks import LENGTH, Network, batch, grown
from training_equivalence import Run, from_text, run, same_tensors, train_whole

SECONDS = 30.0
RECORDS = 16
WEIGHED = "weights: [0.1, 3, 1, 0.5, 2]"
CLASSIFY = "type: softmax_cross_entropy, logits: y, labels: label"
LOSSES = (
    f"{{{CLASSIFY}, ignore_index: -1AXIS}}",
    f"{{{CLASSIFY}, {WEIGHED}, ignore_index: -1AXIS}}",
    f"{{{CLASSIFY}, {WEIGHED}, ignore_index: -1, label_smoothing: 0.1AXIS}}",
    f"{{{CLASSIFY}, ignore_index: -1, reduction: sumAXIS}}",
    "{type: mean_squared, prediction: y, target: t}",
    "{type: mean_squared, prediction: y, target: t, reduction: sum}",
)
OPTIMIZERS = (
    "type: sgd, lr: 0.1",
    "type: momentum, lr: 0.1",
    "type: momentum, lr: 0.05, weight_decay: 0.1",
    "type: nesterov, lr: 0.1",
    "type: adam, lr: 0.01, eps: 0.01",
    "type: adamw, lr: 0.01, eps: 0.01",
    "type: lamb, lr: 0.01, eps: 0.01",
    "type: adagrad, lr: 0.01, initial_accumulator: 0.1",
)
LIMITS = ("1 microbatch", "2 microbatches", "3.5 microbatches", "12kB", "25kB", "60kB")
LINEAR, DIVIDED, EXACT, STEEP, CLIPPED = 2e-6, 2e-5, 1e-10, 1e-8, 1e-6
"""What may differ, of the largest change of a tensor: sums in another order; behind a division by a root of their squares, and where
elements are clipped far below the size of the sums that they are made of, more. What differs by more, in float64 must not: then it is
rounding; a deviation of two records, which may be 0, makes it steep. The norm that clips gradients is a float32 there, too."""


@dataclass(frozen=True)
class Case:
    """A network, its plan, and whether its rows are given as text."""

    net: Network
    head: str
    training: str
    count: int
    schedule: str
    rows: bool
    ignored: int
    more: str = ""
    """What `pipeline` has besides microbatches and schedule."""
    statistics: bool = False
    """Whether a node takes means of the records, which are then those of a microbatch."""
    accumulate: bool = False
    """Whether the plan has `accumulate`, or nothing, instead of `pipeline`."""
    evaluates: bool = False
    """Whether the steps' batches are evaluated behind them."""
    taken: int = 2
    """How many steps are taken."""

    @property
    def linear(self) -> bool:
        """Whether an update is linear in the gradients."""
        kinds = re.findall(r"optimizer: {type: (\w+)", self.training)
        return "clip: {value" not in self.training and {*kinds} <= {"sgd", "momentum", "nesterov"}

    @property
    def whole(self) -> str:
        """The plan that has no stages; statistics are those of the same microbatches."""
        text = train_whole(self.training.replace(", shard: dp", ""))
        some = f"pipeline: {{microbatches: {self.count}, statistics: microbatch}}\n"
        return text + some if self.statistics and self.count > 1 else text

    def plan(self, rows: Sequence[str] = ()) -> str:
        """The plan's text."""
        wanted = str(list(rows)) if rows else self.schedule
        named = f", schedule: {wanted}" if wanted else ""
        if self.accumulate:
            return f"{self.head}{self.training}" + (f"  accumulate: {self.count}\n" if self.count > 1 else "")
        return f"{self.head}{self.training}pipeline: {{microbatches: {self.count}{named}{self.more}}}\n"


def drawn(
    chance: random.Random,
    change: Callable[[random.Random, Network], None] | None = None,
    alone: Sequence[int] | None = None,
) -> Case:
    """The case that chance says; `change` is done to its network, whose cuts are then had by all groups.

    `alone`: no pipeline is to come of it, and these are the numbers of its groups; statistics may be of a batch that is cut then.
    """
    form = chance.choice(["chain", "chain", "loop", "vee", "any"])
    inside = chance.choice(["", "", "tp", "dp", "zero", "mixed"])
    others = inside in ("dp", "zero") or change is not None  # other records make a microbatch
    statistics = chance.random() < 0.15 and (alone is not None or not others)
    net = grown(chance, statistics)
    if change is not None:
        change(chance, net)
    stages = chance.choice(alone or ([2, 3] if inside else [2, 2, 3, 4]))
    head, size, named = _placed(chance, net, form, inside, stages, change is not None)
    fitting = {"chain": ["1f1b", "zb_h1"], "loop": ["interleaved"], "vee": ["zbv"], "any": []}[form]
    schedule = chance.choice([*fitting, *fitting, "gpipe", "auto", "auto", ""])
    loss = chance.choice(LOSSES).replace("AXIS", ", axis: 2" if net.positions else "")
    optimizer = chance.choice(OPTIMIZERS) + (", shard: dp" if inside == "zero" else "")
    if "sum" in loss:  # the same steps as with a mean: none grows beyond what can be compared
        optimizer = optimizer.replace("lr: 0.1", "lr: 0.002").replace("lr: 0.05", "lr: 0.001")
    clip = chance.choice(["", "", "  clip: {norm: 0.3}\n", f"  clip: {{value: {2.0 if 'sum' in loss else 0.05}}}\n"])
    head += _data(net, loss, inside) if inside in ("dp", "zero") else ""
    training = f"train:\n  loss: {loss}\n  optimizer: {{{optimizer}}}\n{clip}"
    count = chance.choice([1, 2, 2, 2, 4, 4, 8])
    ignored = chance.choice([0, RECORDS // count if count > 1 else 0])
    if statistics and count > 1:
        named += ", statistics: microbatch"
    named += f", memory: {chance.choice(LIMITS)}" if chance.random() < 0.3 else ""
    rows = chance.random() < 0.2
    named += _recomputed(chance, net)
    training += _own(chance, net)
    if chance.random() < (0.5 if inside == "zero" else 0.1):
        training += f"  bucket_mb: {chance.choice(['0.0001', '0.0004', '0.001'])}\n"
    return Case(net, f"ranks: {size}\n{head}", training, count, schedule, rows, ignored, named, statistics)


def _own(chance: random.Random, net: Network) -> str:
    """A line of the training: what some parameters have of their own; often none."""
    if chance.random() < 0.6:
        return ""
    ways = [
        "frozen: true",
        "lr: 0.25",
        "weight_decay: 0.2",
        "weight_decay: 0",
        f"optimizer: {{{chance.choice(OPTIMIZERS[4:])}}}",
    ]
    some = chance.sample([*net.weights], chance.randint(1, max(1, len(net.weights) - 1)))
    return f"  parameters: {{{', '.join(f'{name}: {{{chance.choice(ways)}}}' for name in some)}}}\n"


def _recomputed(chance: random.Random, net: Network) -> str:
    """What the backward passes compute again: blocks, all, or any nodes; often nothing."""
    nodes = [name for block in net.blocks for name in block]
    some = chance.sample(nodes, chance.randint(1, len(nodes)))
    patterns = chance.choice(["", "'b*'", "'b*'", "'**'", "'b[0-2]'", f"[{', '.join(some)}]", f"['b*', {some[0]}]"])
    return f", recompute: {patterns}" if patterns else ""


def _placed(
    chance: random.Random, net: Network, form: str, inside: str, stages: int, every: bool = False
) -> tuple[str, int, str]:
    """The plan's lines that place and cut nodes, the number of ranks, and the stages where the plan names them.

    `every`: also ranks that have shares of the batch cut nodes.
    """
    nodes = [[name] for block in net.blocks for name in block] if chance.random() < 0.2 else net.blocks
    turns = {"chain": 1, "loop": 2, "vee": 2, "any": 1}[form]
    order = list(range(stages)) + (list(range(stages)) if form == "loop" else list(range(stages))[::-1] * (turns - 1))
    if form == "any":
        at = parts = [chance.randrange(stages) for _ in nodes]
    else:
        ends = sorted(chance.sample(range(1, len(nodes)), min(len(order), len(nodes)) - 1))
        parts = [sum(end <= k for end in ends) for k in range(len(nodes))]
        at = [order[part] for part in parts]
    longest = f", seq: {{max: {LENGTH}}}" if net.positions else ""
    lines = [f"symbols: {{batch: {{divisor: {RECORDS}, max: {RECORDS}}}{longest}}}"]
    groups = [f"{k}" for k in range(stages)]
    size = stages
    if inside in ("tp", "dp", "zero"):
        axis = "tp" if inside == "tp" else "dp"
        lines.append(f"mesh: {{pp: {stages}, {axis}: 2}}")
        groups, size = [f"{{pp: {k}}}" for k in range(stages)], 2 * stages
    elif inside == "mixed":
        size, groups = 0, []
        for _ in range(stages):
            wide = chance.choice([1, 2])
            groups.append(str(list(range(size, size + wide))))
            size += wide
    followed = 0.1 if chance.random() < 0.3 else 0
    placed = [
        f"{name}: {groups[group]}"
        for block, group in zip(nodes, at, strict=True)
        for name in block
        if chance.random() >= followed
    ]
    named = [
        [name for block, one in zip(nodes, parts, strict=True) if one == k for name in block]
        for k in sorted(set(parts))
    ]
    explicit = len(named) > 1 and form != "any" and chance.random() < 0.4
    if not explicit:
        lines.append(f"placement: {{{', '.join(placed)}}}")
    written = [", ".join(name for name in some if chance.random() >= followed) or some[0] for some in named]
    said = [f"{{nodes: '{some}', on: {groups[order[k]]}}}" for k, some in enumerate(written)]
    wide = {name for block, group in zip(nodes, at, strict=True) for name in block if "," in groups[group]}
    cuts = [f"{name}: {how}" for name, how in net.cut.items() if chance.random() < 0.8]
    if every and inside in ("dp", "zero"):
        cuts = [cut for cut in cuts if not cut.endswith("wise")]
    elif inside != "tp":
        cuts = [cut for cut in cuts if cut.partition(":")[0] in wide]
    if cuts:
        lines.append(f"sharding: {{{', '.join(cuts)}}}")
    return "\n".join([*lines, ""]), size, f", stages: [{', '.join(said)}]" if explicit else ""


def _data(net: Network, loss: str, inside: str) -> str:
    ports = ["x", *(["ids"] if "ids" in net.read else []), "label" if "label" in loss else "t"]
    dims = {"x": 2, "t": 2, "ids": 1, "label": 1}
    cut = [f"{port}: [{', '.join(['dp', *['null'] * (dims[port] - 1 + net.positions)])}]" for port in ports]
    return f"dataset: {{{', '.join(cut)}}}\n"


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    return worked(drawn(chance), folder)


def worked(case: Case, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    return refused_or_wrong(lambda: _equal(case, folder), f"{case.net.text}\n{case.plan()}")


def refused_or_wrong(compare: Callable[[], None], shown: str) -> str:
    """Why a comparison is refused, '' where all is equal; Wrong, with the case as it is `shown`, where it is not."""
    if "--case" in sys.argv:
        print(shown)
    try:
        compare()
    except CompileError as error:
        return f"{error}\n{shown}" if "a bug in partc" in str(error) else str(error)
    except pool.Wrong:
        raise
    except AssertionError as error:
        kind = "different" if "Not equal" in str(error) or "differ" in str(error) else "traceback"
        raise pool.Wrong(kind, f"{traceback.format_exc()[-2500:]}\n{shown}") from error
    except PartcError as error:
        raise pool.Wrong("refused by the runtime", f"{error}\n{shown}") from error
    except Exception as error:
        raise pool.Wrong("traceback", f"{traceback.format_exc()[-2500:]}\n{shown}") from error
    return ""


def _equal(case: Case, folder: Path) -> None:
    net = case.net
    wanted = ["x", *(["ids"] if "ids" in net.read else []), "label" if "label" in case.training else "t"]
    steps = [{name: batch(net, k, RECORDS, case.ignored)[name] for name in wanted} for k in range(case.taken)]

    def ran(plan: str, out: str, double: bool = False) -> Run:
        text, at = (_in_doubles(net.text), "float64") if double else (net.text, "float32")
        if double:  # twice the bytes
            plan = re.sub(r"memory: (\d+)kB", lambda found: f"memory: {2 * int(found[1])}kB", plan)
        source = from_text(text, net.weights, dtype=at)
        blocks = {name: f"b{k}" for k, block in enumerate(net.blocks) for name in block}
        for node in source.model.graph:
            node.name = f"{blocks[node.name or '']}.{node.name}"
        given = [
            {name: one.astype(at) if one.dtype.kind == "f" else one for name, one in step.items()} for step in steps
        ]
        return run(source, plan, folder / out, given, evaluates=case.evaluates)

    have = ran(case.plan(), "cut")
    checked(folder / "cut")
    if case.rows and have.program.tasks is not None:
        rows = [line.split(": ", 1)[1] for line in str(have.program.tasks.schedule).splitlines()]
        have = ran(case.plan(rows), "rows")
        checked(folder / "rows")
    want = ran(case.whole, "whole")
    try:
        same(have, want, LINEAR if case.linear else DIVIDED)
    except AssertionError as error:
        try:
            double = ran(case.plan(), "double", True), ran(case.whole, "double_whole", True)
        except CompileError as why:  # not every op has a kernel of float64
            raise AssertionError(f"{error}\nand in float64: {why}") from error
        exact = STEEP if case.statistics else EXACT
        same(*double, CLIPPED if "clip: {norm" in case.training else exact)
        raise pool.Wrong(pool.ROUNDING, "") from None


def _in_doubles(text: str) -> str:
    """The model in float64; Erf, with which Gelu is computed exactly, has no kernel there."""
    return text.replace("float", "double").replace("Gelu (", 'Gelu <approximate = "tanh"> (')


def same(have: Run, want: Run, bound: float) -> None:
    """AssertionError where outputs or tensors differ by more than a part of them."""
    for k, (one, other) in enumerate(zip(have.outputs, want.outputs, strict=True)):
        for name, value in other.items():
            bound = max(bound, 4 * float(np.finfo(value.dtype).eps))  # a loss is float32 in any case
            np.testing.assert_allclose(one[name], value, rtol=bound, atol=bound, err_msg=f"step {k}: {name}")
    same_tensors(have.after, want.after, want.before, bound)


def checked(build: Path) -> None:
    """Wrong where `partc check` refuses an artifact."""
    if found := check_artifact(build):
        raise pool.Wrong("refused by check", "\n".join(map(str, found[:4])))


def reason(text: str) -> str:
    """What all refusals of one kind have in common: the fact without its names and numbers."""
    line = text.strip().splitlines()[0].split(": ", 1)[-1]
    return re.sub(r"'[^']*'|\b[nvw]?\d[\d.]*\b|\(.*?\)", "_", line)[:100]


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
