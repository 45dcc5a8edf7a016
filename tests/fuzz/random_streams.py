"""Random stages, schedules and plans without training: a batch as microbatches gives what onnxruntime gives of it whole.

    python tests/fuzz/random_streams.py --cases 500 --seed 1
    python tests/fuzz/random_streams.py --case 17 --seed 1       one, with its model and its plan

A case is a network of `staged_networks.py` with several outputs, some turned so that records lie along another dim, on stages of one rank
or two (tensor parallel, data parallel); outputs go to one rank, stay with their producer, or stay sharded. Batches of unlike
sizes, where records have positions also of one, must give the numbers of the unsharded model, and `partc check` must accept the
artifact. What is refused is counted by its reason.
"""

from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

import numpy as np
import onnx
import pool
from equivalence import compiled, same, whole_outputs
from onnx import numpy_helper
from partc.compiler.errors import CompileError
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import PartcError
from random_pipelines import RECORDS, _placed, reason
from staged_networks import LENGTH, Network, batch, grown

SECONDS = 30.0
CLOSE = 2e-5
"""What may differ, of the largest value of an output: sums in another order, through a few layers."""


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    net, proto = _with_outputs(chance)
    form = chance.choice(["chain", "chain", "loop", "vee", "any"])
    inside = chance.choice(["", "", "tp", "dp", "dp", "mixed"])
    head, size, stages = _placed(chance, net, form, inside, chance.choice([2, 3] if inside else [2, 2, 3, 4]))
    head = head.replace(f", max: {RECORDS}", "").replace(", seq: {max: 3}", "")
    if inside == "dp" and chance.random() < 0.7:
        head += f"dataset: {{{', '.join(_dealt(net, name) for name in _inputs(net))}}}\n"
    head += chance.choice(["", "", "outputs: sharded\n", "outputs: producer\n", "outputs: {y: 0}\n"])
    fitting = {"chain": ["1f1b", "zb_h1"], "loop": ["interleaved"], "vee": ["zbv"], "any": []}[form]
    schedule = chance.choice([*fitting, "gpipe", "auto", ""])
    named = f", schedule: {schedule}" if schedule else ""
    plan = f"ranks: {size}\n{head}pipeline: {{microbatches: {chance.choice([1, 2, 2, 4, 4, 8])}{named}{stages}}}\n"
    shown = f"{onnx.printer.to_text(proto) if '--case' in sys.argv else net.text}\n{plan}"
    if "--case" in sys.argv:
        print(shown)
    try:
        _equal(proto, plan, net, folder / "build")
    except CompileError as error:
        return f"{error}\n{shown}" if "a bug in partc" in str(error) else str(error)
    except AssertionError as error:
        raise pool.Wrong("different", f"{traceback.format_exc()[-2500:]}\n{shown}") from error
    except PartcError as error:
        raise pool.Wrong("refused by the runtime", f"{error}\n{shown}") from error
    except Exception as error:
        raise pool.Wrong("traceback", f"{traceback.format_exc()[-2500:]}\n{shown}") from error
    return ""


def _with_outputs(chance: random.Random) -> tuple[Network, onnx.ModelProto]:
    """A network, and its model with a few of its values as further outputs."""
    net = grown(chance)
    rank = 3 if net.positions else 2
    made = [line.split("] ")[1].split(" = ")[0] for line in net.lines]
    some = [name for name in made if "," not in name and name != "y"]
    extra = []
    net.blocks.append([])
    for k, name in enumerate(chance.sample(some, min(len(some), chance.choice([0, 1, 2])))):
        turned = chance.random() < 0.5
        if turned and _rank_of(net, name) == rank:
            perm = [1, 0, 2][:rank] if rank == 3 else [1, 0]
            net.add(f"Transpose <perm = {perm}>", name, out=f"out{k}")
            extra.append(f"out{k}")
        else:
            extra.append(name)
    net.blocks = [block for block in net.blocks if block]
    proto = onnx.parser.parse_model(net.text.replace("bool on = {1}", "bool on = {0}"))
    rng = np.random.default_rng(4)
    for name, shape in net.weights.items():
        proto.graph.initializer.append(
            numpy_helper.from_array((rng.standard_normal(shape) / 2).astype(np.float32), name)
        )
    known = {one.name: one for one in onnx.shape_inference.infer_shapes(proto).graph.value_info}
    proto.graph.output.extend(known[name] for name in extra if name in known)
    return net, proto


def _rank_of(net: Network, name: str) -> int:
    proto = onnx.parser.parse_model(net.text)
    known = {one.name: one for one in onnx.shape_inference.infer_shapes(proto).graph.value_info}
    return len(known[name].type.tensor_type.shape.dim) if name in known else 0


def _inputs(net: Network) -> list[str]:
    return ["x", *(["ids"] if "ids" in net.read else [])]


def _dealt(net: Network, name: str) -> str:
    dims = {"x": 2, "ids": 1}[name] + net.positions
    return f"{name}: [{', '.join(['dp', *['null'] * (dims - 1)])}]"


def _equal(proto: onnx.ModelProto, plan: str, net: Network, build: Path) -> None:
    compiled(proto, plan, build)
    if found := check_artifact(build):
        raise pool.Wrong("refused by check", "\n".join(map(str, found[:4])))
    with load_local(build) as ranks:
        sizes = ((RECORDS, LENGTH), (3 * RECORDS, 5), (RECORDS, 1))
        for records, length in sizes if net.positions else sizes[:2]:
            given = {name: batch(net, records, records, 0, length)[name] for name in _inputs(net)}
            want, have = whole_outputs(proto, given), ranks(given)
            assert set(have) == set(want)
            for name, value in want.items():
                same(have[name], value, f"{records} records, {length} positions: {name}", CLOSE, CLOSE)


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
