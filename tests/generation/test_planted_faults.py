"""What `partc check` says of a decoder's artifact in which one promise is broken: each fault is named, with its node or its numbers."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoder_layouts import LAYOUTS, STAGES
from decoders import decoder
from mutated import change_file, rewrite_raw, texts
from onnx import ModelProto, NodeProto, helper, numpy_helper
from partc.compiler.pipeline import compile_model
from partc.runtime.checker.check import check

Change = Callable[[ModelProto], None]
APPENDS = ("TensorScatter", "GroupQueryAttention")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of a decoder: over two stages, and on one rank with fused attention."""
    found = {}
    for layout, fused in (("stages", False), ("one rank", True)):
        folder = tmp_path_factory.mktemp("planted")
        onnx.save(decoder(fused=fused), folder / "model.onnx")
        (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{slots: 4, length: 32, chunk: 8}}\n")
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        found[layout] = folder / "build"
    return found


def found_in(build: Path, folder: Path, changes: Mapping[str, Change]) -> str:
    """What the check says of a copy of an artifact with changed files."""
    shutil.copytree(build, folder)
    for file, change in changes.items():
        change_file(folder, file, change)
    return texts(folder)


def first(model: ModelProto, *kinds: str) -> int:
    """The place of the first node of these ops."""
    return next(k for k, node in enumerate(model.graph.node) if node.op_type in kinds)


def without(kind: str) -> Change:
    """Takes the first node of an op out."""

    def change(model: ModelProto) -> None:
        del model.graph.node[first(model, kind)]

    return change


@pytest.mark.parametrize(
    ("program", "rank", "kind", "fact"),
    [
        ("", 1, "Recv", "rank_0000.onnx: Send '.*': tag 0 has no Recv on rank 1"),
        ("prefill_", 0, "Send", "rank_0001.onnx: Recv '.*': tag 0 has no Send on rank 0"),
    ],
)
def test_a_message_without_its_other_end(
    built: dict[str, Path], tmp_path: Path, program: str, rank: int, kind: str, fact: str
) -> None:
    told = found_in(built["stages"], tmp_path / "build", {f"{program}rank_{rank:04}.onnx": without(kind)})
    assert re.search(f"^{program}{fact}", told.replace(" (layers.0.Add_40)", ""), re.MULTILINE), told


def test_a_message_of_a_prefill_that_a_decode_receives(built: dict[str, Path], tmp_path: Path) -> None:
    """Both files stay sound graphs: the prefill reads zeros in its place, the decode gives it to no node."""
    moved = list[NodeProto]()

    def zeros(model: ModelProto) -> None:
        at = first(model, "Recv")
        moved.append(copy.deepcopy(model.graph.node[at]))
        value = next(one for one in model.graph.value_info if one.name == moved[0].output[0])
        shape = np.array([dim.dim_value for dim in value.type.tensor_type.shape.dim])
        model.graph.initializer.append(numpy_helper.from_array(shape, "odd.shape"))
        model.graph.node[at].CopyFrom(helper.make_node("ConstantOfShape", ["odd.shape"], [value.name], name="odd"))

    def receives(model: ModelProto) -> None:
        moved[0].name, moved[0].output[0] = "odd_node", "odd.late"
        next(one for one in moved[0].attribute if one.name == "tag").i = 1
        model.graph.node.append(moved[0])

    told = found_in(built["stages"], tmp_path / "build", {"prefill_rank_0001.onnx": zeros, "rank_0001.onnx": receives})
    assert re.search("^prefill_rank_0000.onnx: Send .* tag 0 has no Recv on rank 1", told, re.MULTILINE), told
    assert re.search("^rank_0001.onnx: Recv 'odd_node'.*: tag 1 has no Send on rank 0", told, re.MULTILINE), told


def read_again(model: ModelProto) -> None:
    """Another node reads a cache behind the one that appends to it."""
    node = model.graph.node[first(model, *APPENDS)]
    cache = next(name for name in node.input if name.startswith("past"))
    model.graph.node.append(helper.make_node("Identity", [cache], ["odd"], name="odd_node"))


def written_twice(model: ModelProto) -> None:
    """Another node appends to the same cache."""
    at = first(model, *APPENDS)
    node = copy.deepcopy(model.graph.node[at])
    node.name, node.output[:] = "odd_node", [f"{name}.odd" for name in node.output]
    model.graph.node.insert(at + 1, node)


def swapped(model: ModelProto) -> None:
    """Two layers append to each other's cache."""
    one, other = [node for node in model.graph.node if node.op_type in APPENDS][:2]
    k = next(k for k, name in enumerate(one.input) if name.startswith("past"))
    one.input[k], other.input[k] = other.input[k], one.input[k]
    one.name = "odd_node"


@pytest.mark.parametrize(("layout", "program"), [("stages", "prefill_"), ("one rank", "")])
@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (read_again, "Identity 'odd_node'.*: it reads 'past_.*', which .* overwrites; a cache is read by the one node"),
        (written_twice, "'odd_node'.*: it reads 'past_.*', which .* overwrites; a cache is read by the one node"),
        (swapped, "'odd_node'.*: no node makes 'present_.*' of 'past_.*' by appending to it"),
    ],
)
def test_a_cache_that_is_not_written_by_its_one_reader(
    built: dict[str, Path], tmp_path: Path, layout: str, program: str, change: Change, fact: str
) -> None:
    told = found_in(built[layout], tmp_path / "build", {f"{program}rank_0000.onnx": change})
    assert re.search(f"^{program}rank_0000.onnx: .*{fact}", told, re.MULTILINE), told


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("slots", 8, "the cache 'past_k.0' has 4 rows; a step of decode computes 8"),
        ("slots", 3, "its 3 slots are not 1 equal runs of 2 equal groups"),
        ("length", 64, "the cache 'past_k.0' has room for 39 entries; sequences of 64 tokens in chunks of 8 need 71"),
        ("chunk", 7, "tokens: the input 'ids' has the shape [1, 8]; it must be [1, 7]"),
        ("padded", False, "tokens: the input 'ids' has the shape [1, 8]; it must be [1, 1 to 8]"),
        ("vocabulary", 60, "logits: the output 'logits' has the shape [4, 64]; it must be [4, 60]"),
        ("next", "odd", "next: there is no output 'odd'"),
        ("position", "count", "are the inputs 'ids', 'count', 'count'; each is another one"),
        ("stop", [64], "a sequence stops at 64, which is not a token; tokens are 0 to 63"),
    ],
)
def test_what_is_said_of_the_generation_fits_its_programs(
    built: dict[str, Path], tmp_path: Path, key: str, value: Any, fact: str
) -> None:
    shutil.copytree(built["one rank"], tmp_path / "build")
    changes = {key: value, **({"groups": 2} if value == 3 else {})}
    rewrite_raw(tmp_path / "build", lambda data: data["generation"].update(changes))
    assert re.search(f"^manifest.json: .*{re.escape(fact)}", texts(tmp_path / "build"), re.MULTILINE)


def test_caches_without_a_generation_or_a_prefill(built: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(built["one rank"], tmp_path / "build")
    rewrite_raw(tmp_path / "build", lambda data: data["programs"].pop("prefill"))
    told = texts(tmp_path / "build")
    assert re.search("its programs are decode.*; tokens are made by 'decode' and 'prefill'", told), told
    rewrite_raw(tmp_path / "build", lambda data: data.update(generation=None))
    assert "ranks keep the cache 'past_k.0', and the manifest has no generation" in texts(tmp_path / "build")


def test_ranks_that_read_sizes_alone_are_proven_to_have_the_same_caches(tmp_path: Path) -> None:
    """The second stage is given no ids, and both of its ranks have whole caches."""
    onnx.save(decoder(flat=True), tmp_path / "model.onnx")
    stages = STAGES.format(first="[0, 1]", second="[2, 3]")
    cuts = 'sharding: {"layers.*.up": colwise, "layers.*.down": rowwise}\n'
    (tmp_path / "plan.yaml").write_text(f"ranks: 4\n{cuts}{stages}generate: {{length: 20, chunk: 5}}\n")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    found = check(tmp_path / "build")
    assert (found.violations, found.state.copies) == ([], 4)
