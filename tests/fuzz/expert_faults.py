"""Faults planted in the programs of experts that ranks share, each of which `partc check` must find.

    python tests/fuzz/expert_faults.py --cases 100 --seed 1
    python tests/fuzz/expert_faults.py --case 17 --seed 1       one, with the text of the check

A fault changes a Route, a Return, or the nodes that sort rows by expert and multiply them, in the files of one rank or of all, hashes
corrected: a Return by another Route's counts, experts of another rank, rows of another order, a missing dual, a rank of another axis. The
artifacts are a training whose tokens and experts share an axis, one with a second data axis, an inference in microbatches, and a training
whose rows travel in eight bits.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
from onnx import NodeProto, helper

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from equivalence import compiled
from expert_layers import SGD, model
from mutated import correct
from partc.runtime.checker.check import check_artifact
from semantic_mutants import Draft, box

BATCH = "symbols: {batch: {divisor: 8}}\n"
TOKENS = "dataset: {x: [[dp, ep], null], t: [[dp, ep], null]}\n"
PLANS = {
    "training": f"ranks: 4\nmesh: {{dp: 4}}\n{BATCH}dataset: data_parallel\nexperts: {{axis: dp}}\n{SGD}",
    "two axes": f"ranks: 4\nmesh: {{dp: 2, ep: 2}}\n{BATCH}{TOKENS}experts: {{axis: ep}}\n{SGD}",
    "microbatches": f"ranks: 4\nmesh: {{dp: 4}}\n{BATCH}dataset: data_parallel\noutputs: sharded\nexperts: {{axis: dp}}\n"
    "pipeline: {microbatches: 2}\n",
    "eight bits": f"ranks: 4\nmesh: {{dp: 4}}\n{BATCH}dataset: data_parallel\nexperts: {{axis: dp}}\n{SGD}"
    "messages: {rows: {bits: 8, block: 6}}\n",
}
SENT, COUNTS = -2, -1
"""The places of a Route's data among the inputs of what reads them."""


def _ops(draft: Draft, *op_types: str) -> list[NodeProto]:
    return [node for node in draft.nodes(plain=False) if node.op_type in op_types]


def _drawn(draft: Draft, *op_types: str, of: Callable[[NodeProto], bool] = lambda node: True) -> list[NodeProto]:
    return draft.draw([node for node in _ops(draft, *op_types) if of(node)])


def _follows(node: NodeProto) -> bool:
    """Whether a node reads the data of a Route."""
    return node.op_type == "Return" or not node.input[1]


def _attribute(node: NodeProto, name: str) -> onnx.AttributeProto:
    return next(one for one in node.attribute if one.name == name)


def _redirect(draft: Draft, places: Sequence[int]) -> bool:
    """A node reads places and counts of another Route."""
    nodes = _drawn(draft, "Route", "Return", of=_follows)
    made = {(one.output[2], one.output[3]) for one in _ops(draft, "Route") if len(one.output) == 4}
    if not nodes or len(made) < 2:
        return False
    other = draft.chance.choice(sorted(made - {(nodes[0].input[SENT], nodes[0].input[COUNTS])}))
    for node in nodes:
        for at in places:
            node.input[at] = other[at]
    return True


def by_another_route(draft: Draft) -> bool:
    """A Return, or a Route of cotangents, reads the places and counts of another Route."""
    return _redirect(draft, (SENT, COUNTS))


def counts_of_another_route(draft: Draft) -> bool:
    """A Return reads its own places, and the counts of another Route."""
    return _redirect(draft, (COUNTS,))


def places_of_another_route(draft: Draft) -> bool:
    """A Return reads its own counts, and the places of another Route."""
    return _redirect(draft, (SENT,))


def changed_counts(draft: Draft) -> bool:
    """The counts are computed with on the way to a Return."""
    nodes = _drawn(draft, "Return")
    for node in nodes:
        _before(draft, node, helper.make_node("Neg", [node.input[COUNTS]], [f"{node.input[COUNTS]}.other"]))
        node.input[COUNTS] += ".other"
    return bool(nodes)


def _bodies(draft: Draft) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    for one in draft.models.values():
        yield one.graph
        yield from one.functions


def _before(draft: Draft, node: NodeProto, new: NodeProto) -> None:
    for body in _bodies(draft):
        for at, one in enumerate(body.node):
            if one is node or (one.name == node.name and one == node):
                body.node.insert(at, new)
                return


def number_of_experts(draft: Draft) -> bool:
    """A Route and all that follow it speak of twice as many experts, so that ranks get the rows of others."""
    made = _drawn(draft, "Route", of=lambda node: not _follows(node))
    data = {node.output[2] for node in made}
    for node in [*made, *(one for one in _ops(draft, "Route", "Return") if _follows(one) and one.input[SENT] in data)]:
        _attribute(node, "rows").i *= 2
    return bool(made)


def owners_in_another_order(draft: Draft) -> bool:
    """The runs of experts belong to the ranks in another order."""
    made = _drawn(draft, "Route", "Return")
    order = [*_attribute(made[0], "owners").ints]
    order[0], order[-1] = order[-1], order[0]
    for node in made:
        _attribute(node, "owners").ints[:] = order
    return bool(made)


def another_axis(draft: Draft) -> bool:
    """A Route or a Return is of the ranks of another axis, in the manifest, too, if all ranks say so."""
    nodes = _drawn(draft, "Route", "Return")
    own = _attribute(nodes[0], "group").s.decode()
    others = [name for name in sorted(draft.manifest["groups"]) if name != own]
    if not others:
        return False
    other = draft.chance.choice(others)
    for node in nodes:
        _attribute(node, "group").s = other.encode()
    if len(draft.models) == len(draft.files):
        for program in draft.manifest["programs"].values():
            for record in program["collectives"]:
                if record["value"] in nodes[0].output:
                    record["group"] = other
    return True


def size_of_a_row(draft: Draft) -> bool:
    """A Return or a Route says another size of a row."""
    nodes = _drawn(draft, "Route", "Return")
    for node in nodes:
        _attribute(node, "row").ints[0] += 1
    return bool(nodes)


def another_tag(draft: Draft) -> bool:
    """Two nodes have each other's tags on a rank, so that its rows meet those of another message."""
    nodes = _ops(draft, "Route", "Return")
    first, second = draft.chance.sample(sorted({node.name for node in nodes}), 2)
    tags = {node.name: _attribute(node, "tag").i for node in nodes}
    for node in nodes:
        if node.name in (first, second):
            _attribute(node, "tag").i = tags[second if node.name == first else first]
    return True


def _kept(draft: Draft, op_type: str, of: Callable[[NodeProto], bool], everywhere: bool) -> bool:
    nodes = _drawn(draft, op_type, of=of)
    if not nodes:
        return False
    results = {name for node in nodes for name in node.output}
    for node in nodes:
        node.domain, node.op_type = "", "Identity"
        del node.input[1:], node.output[1:], node.attribute[:]
    for program in draft.manifest["programs"].values() if everywhere else ():
        program["collectives"] = [one for one in program["collectives"] if one["value"] not in results]
    return True


def rows_that_stay(draft: Draft) -> bool:
    """A rank keeps the rows that it should send back."""
    return _kept(draft, "Return", lambda node: True, False)


def missing_dual(draft: Draft) -> bool:
    """The gradient of a Route or a Return is missing on all ranks, and in the manifest."""
    of_gradients = draft.chance.choice(["Route", "Return"])
    return _kept(draft, of_gradients, lambda node: _follows(node) and ".grad" in node.input[0], True)


def rows_unsorted(draft: Draft) -> bool:
    """Rows are multiplied as they came, and not sorted by expert."""
    nodes = _drawn(draft, "Gather", of=lambda node: node.input[1].endswith(".order"))
    for node in nodes:
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]
    return bool(nodes)


def results_in_another_order(draft: Draft) -> bool:
    """Results are put at the places that another product has sorted, or at those of rows as they came."""
    nodes = _drawn(draft, "Unsqueeze", of=lambda node: node.input[0].endswith(".order"))
    if not nodes:
        return False
    own = nodes[0].input[0]
    others = {name for one in _ops(draft, "TopK") for name in one.output if name.endswith(".order")} - {own}
    choice = draft.chance.choice([*sorted(others), own.removesuffix(".order") + ".places"])
    for node in nodes:
        node.input[0] = choice
    return choice in {name for one in draft.nodes() for name in one.output}


def sorted_by_another_key(draft: Draft) -> bool:
    """Rows are sorted by their places alone, or by experts alone, which is no order of theirs."""
    nodes = _drawn(draft, "TopK", of=lambda node: node.input[0].endswith(".key"))
    word = draft.chance.choice(["places", "major"])
    for node in nodes:
        node.input[0] = node.input[0].removesuffix("key") + word
    return bool(nodes)


def falling_order(draft: Draft) -> bool:
    """The expert with the largest number comes first, and its rows meet the first matrix."""
    nodes = _drawn(draft, "TopK", of=lambda node: node.input[0].endswith(".key"))
    for node in nodes:
        _attribute(node, "largest").i = 1
    return bool(nodes)


def another_matrix(draft: Draft) -> bool:
    """Two experts' rows are multiplied with each other's matrices."""
    nodes = _drawn(draft, "Split", of=lambda node: ".weights" in node.output[0])
    for node in nodes:
        node.output[0], node.output[1] = node.output[1], node.output[0]
    return bool(nodes)


def another_part(draft: Draft) -> bool:
    """The rows of two experts are exchanged before the products, or their results or gradients after them."""
    word = draft.chance.choice([".rows0", ".results", ".grad.Split.0"])
    nodes = _drawn(
        draft,
        "Concat" if word == ".results" else "Split",
        of=lambda node: node.output[0].endswith(word),
    )
    for node in nodes:
        some = node.input if word == ".results" else node.output
        some[0], some[1] = some[1], some[0]
    return bool(nodes)


def lengths_of_another_layer(draft: Draft) -> bool:
    """The number of rows of each expert is counted of another Route's rows."""
    nodes = _drawn(draft, "ScatterElements", of=lambda node: node.input[1].endswith(".experts"))
    if not nodes:
        return False
    others = {name for one in _ops(draft, "Route") for name in one.output[1:2]} - {nodes[0].input[1]}
    if not others:
        return False
    choice = draft.chance.choice(sorted(others))
    for node in nodes:
        node.input[1] = choice
    return True


def experts_of_another_layer(draft: Draft) -> bool:
    """Rows are sorted by, or biases are looked up by, the experts of another Route's rows."""
    nodes = _drawn(draft, "Mul", "Gather", of=lambda node: any(name.endswith(".experts") for name in node.input))
    made = {name for one in _ops(draft, "Route") for name in one.output[1:2]}
    for node in nodes:
        at = next(k for k, name in enumerate(node.input) if name.endswith(".experts"))
        if not (others := sorted(made - {node.input[at]})):
            return False
        node.input[at] = others[0]
    return bool(nodes)


def experts_of_another_rank(draft: Draft) -> bool:
    """A rank has the matrices of another rank's experts."""
    return len(draft.models) < len(draft.files) and box(draft)


def scales_of_other_rows(draft: Draft) -> bool:
    """Codes are unpacked with the scales of other rows."""
    nodes = _drawn(draft, "DequantizeLinear")
    others = {one.input[1] for one in _ops(draft, "DequantizeLinear")} - {node.input[1] for node in nodes}
    choice = draft.chance.choice(sorted(others)) if others else ""
    for node in nodes:
        node.input[1] = choice
    return bool(nodes and others)


def scales_of_other_blocks(draft: Draft) -> bool:
    """A scale is made of other numbers than the block that it divides."""
    nodes = _drawn(draft, "QuantizeLinear")
    for node in nodes:
        _before(draft, node, helper.make_node("Neg", [node.input[1]], [f"{node.input[1]}.other"]))
        node.input[1] += ".other"
    return bool(nodes)


KINDS: dict[str, Callable[[Draft], bool]] = {
    function.__name__: function
    for function in (
        by_another_route,
        counts_of_another_route,
        places_of_another_route,
        changed_counts,
        number_of_experts,
        owners_in_another_order,
        another_axis,
        size_of_a_row,
        another_tag,
        rows_that_stay,
        missing_dual,
        rows_unsorted,
        results_in_another_order,
        sorted_by_another_key,
        falling_order,
        another_matrix,
        another_part,
        lengths_of_another_layer,
        experts_of_another_layer,
        experts_of_another_rank,
        scales_of_other_rows,
        scales_of_other_blocks,
    )
}


def build(folder: Path) -> None:
    """Compiles the artifacts."""
    for name, plan in PLANS.items():
        compiled(model(2), plan, folder / name, check=False)
        assert not (found := check_artifact(folder / name)), found[0]


def planted(folder: Path, target: Path, seed: int, case: int) -> str:
    """Writes an artifact with the fault of a case; returns its kind and place, or "" if no artifact has anything of the kind."""
    chance, kind = random.Random(f"{seed} {case}"), [*KINDS][case % len(KINDS)]
    scope = chance.choice(["one rank", "all ranks"])
    for name in chance.sample([*PLANS], len(PLANS)):
        manifest = json.loads((folder / name / "manifest.json").read_text())
        files = {
            path.name: onnx.load(path, load_external_data=False) for path in sorted((folder / name).glob("rank_*.onnx"))
        }
        chosen = dict([chance.choice(sorted(files.items()))]) if scope == "one rank" and len(files) > 1 else files
        before = {file: one.SerializeToString(deterministic=True) for file, one in files.items()}
        draft = Draft(manifest, files, chosen, chance)
        if not KINDS[kind](draft) or all(
            files[file].SerializeToString(deterministic=True) == one for file, one in before.items()
        ):
            continue
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / name, target)
        for file, one in files.items():
            (target / file).write_bytes(one.SerializeToString(deterministic=True))
        (target / "manifest.json").write_text(json.dumps(manifest))
        correct(target)
        return f"{kind}: {name}, {scope if len(chosen) < len(files) else 'all ranks'}: {draft.target}"
    return ""


def main(cases: Sequence[int], seed: int) -> int:
    """Plants faults; returns the number of those that are not found."""
    ends: Counter[tuple[str, bool]] = Counter()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        build(folder)
        for case in cases:
            what = planted(folder, folder / "fault", seed, case)
            if not what:
                continue
            found = check_artifact(folder / "fault")
            ends[what.partition(":")[0], bool(found)] += 1
            if not found or len(cases) == 1:
                print(f"{case}: {what}: {found[0] if found else 'NOT FOUND'}", flush=True)
    for kind in KINDS:
        print(f"{kind:28} {ends[kind, True]:4} found {ends[kind, False]:4} not")
    found, missed = (sum(number for (_, end), number in ends.items() if end is one) for one in (True, False))
    print(f"{found} of {found + missed} faults found")
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="one case again")
    options = parser.parse_args()
    sys.exit(bool(main(range(options.cases) if options.case is None else [options.case], options.seed)))
