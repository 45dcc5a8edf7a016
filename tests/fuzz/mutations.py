"""Semantic mutations of artifacts, hashes corrected: what a fault of the compiler would write. The checker refuses each, or it is harmless.

python tests/fuzz/mutations.py 2000 [SEED]        so many mutations of every kind of artifact, and the share that is caught
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from mutated import change_manifest, correct
from mutation_kinds import KINDS, Array, Kind, build, run
from mutations_of_calls import (
    Draft,
    Mutation,
    boxes,
    drop,
    duplicate,
    group,
    peers,
    reduce,
    remove,
    renumber,
    rewire,
    swap,
    turn_group,
)
from mutations_of_fields import (
    another_op,
    attribute,
    call_attribute,
    field,
    header,
    operand,
    said_of_itself,
)
from mutations_of_microbatches import MICROBATCH_MUTATIONS
from mutations_of_records import expressions, offset, port_boxes, programs, shapes, types, weights
from mutations_of_rows import ROW_MUTATIONS
from partc.runtime.checker.check import check_artifact

MUTATIONS: dict[str, Mutation] = {
    "drop on one rank": drop(False),
    "drop on all": drop(True),
    "remove everywhere": remove,
    "duplicate on one rank": duplicate(False),
    "duplicate on all": duplicate(True),
    "swap on one rank": swap(False),
    "swap on all": swap(True),
    "peer": renumber("peer", False),
    "tag on one rank": renumber("tag", False),
    "tag on all": renumber("tag", True),
    "axis on one rank": renumber("axis", False),
    "axis on all": renumber("axis", True),
    "split axis on all": renumber("split_axis", True),
    "root on all": renumber("root", True),
    "reduction on one rank": reduce(False),
    "reduction on all": reduce(True),
    "group on one rank": group(False),
    "group on all": group(True),
    "order of a group": turn_group,
    "boxes given": boxes("send_boxes"),
    "boxes taken": boxes("recv_boxes"),
    "peers of an exchange": peers,
    "declared type": types,
    "declared dim": expressions,
    "shape in the manifest": shapes,
    "programs": programs,
    "pieces of an input": port_boxes("inputs"),
    "pieces of an output": port_boxes("outputs"),
    "pieces of a tensor": port_boxes("state"),
    "weights of two ranks": weights,
    "offset": offset,
    "another value sent": rewire,
    "a field of the manifest": field(),
    "a field of the training": field("training"),
    "a field of the state": field("state"),
    "an attribute of a communication": call_attribute,
    "an operand on one rank": operand,
    "an op on one rank": another_op,
    "an attribute on one rank": attribute,
    "what a file says of itself": said_of_itself,
    "the header of a weights file": header,
    **ROW_MUTATIONS,
    **MICROBATCH_MUTATIONS,
}


def mutate(name: str, source: Path, target: Path, seed: str) -> bool:
    """A copy of an artifact with one mutation; False where it has nothing of that."""
    shutil.copytree(source, target)
    programs = [*json.loads((target / "manifest.json").read_text())["programs"]]
    chance = random.Random(seed)
    program = chance.choice(programs[1:]) if len(programs) > 1 and chance.random() < 0.3 else ""
    files = sorted(target.glob(f"{program}_rank_*.onnx" if program else "rank_*.onnx"))
    models = {path.name: onnx.load(path, load_external_data=False) for path in files}
    done = False

    def change(data: dict[str, Any]) -> None:
        nonlocal done
        done = MUTATIONS[name](Draft(models, data, chance, target))

    if name.startswith("a field of"):
        raw = json.loads((target / "manifest.json").read_text())
        change(raw)
        (target / "manifest.json").write_text(json.dumps(raw))
    else:
        change_manifest(target, change, program)
    for file, model in models.items():
        (target / file).write_bytes(model.SerializeToString(deterministic=True))
    correct(target)
    return done


def same(one: dict[str, Array] | str, two: dict[str, Array] | str) -> bool:
    """Whether two runs gave and left the same, up to the order of sums."""
    if isinstance(one, str) or isinstance(two, str) or one.keys() != two.keys():
        return False
    return all(one[name].shape == two[name].shape and np.allclose(one[name], two[name], 1e-5, 1e-6) for name in one)


def judge(kind: Kind, source: Path, wanted: dict[str, Array] | str, name: str, seed: str) -> str:
    """`refused`, `harmless`, `none` where there is nothing to mutate, or what came of a mutation that the checker does not tell."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "build"
        if not mutate(name, source, target, seed):
            return "none"
        if check_artifact(target):
            return "refused"
        found = run(kind, target)
        if same(wanted, found):
            return "harmless"
        return "refused by the run" if isinstance(found, str) else "other results"


def sweep(count: int, seed: int, names: Sequence[str] = tuple(KINDS)) -> tuple[Counter[str], list[str]]:
    """So many mutations of each kind of artifact, each seeded; how they ended, and those that were missed."""
    ends: Counter[str] = Counter()
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            source = build(KINDS[name], Path(scratch) / name)
            wanted = run(KINDS[name], source)
            assert not isinstance(wanted, str), wanted
            order = random.Random(f"{seed} {name}")
            mutations = [
                mutation
                for _ in range(count // len(MUTATIONS) + 1)
                for mutation in order.sample(sorted(MUTATIONS), len(MUTATIONS))
            ]
            for at, mutation in enumerate(mutations[:count]):
                end = judge(KINDS[name], source, wanted, mutation, f"{seed} {name} {at}")
                ends[end if end in ("refused", "harmless", "none") else "missed"] += 1
                if end not in ("refused", "harmless", "none"):
                    missed.append(f"{name}, {mutation}, {at}: {end}")
    return ends, missed


def told(ends: Counter[str]) -> str:
    """The share that was caught, of those that matter."""
    matter = ends["refused"] + ends["missed"]
    return f"{ends['refused']} of {matter} mutations refused ({100 * ends['refused'] / max(matter, 1):.1f} %), {ends['harmless']} harmless"


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    counted, lost = sweep(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n".join([*lost, told(counted)]))
