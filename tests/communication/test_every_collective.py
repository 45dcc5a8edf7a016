"""Collectives of the runtime on in-process ranks: every op, axis and type against numpy, memory, unknown shapes, wrong files."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from artifact_text import HEAD, write
from partc.runtime import RankError, load_local
from partc.runtime.artifact.comm.collective_node import CollectiveCall
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.tensor import Tensor
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.collective import dynamic_collective
from partc.runtime.communication.in_process import LocalTransport, LocalWorld
from partc.runtime.program.steps import WaitCollective
from rows import rows
from run_collectives import run, run_reference, same, shards, spmd, text, whole

RANKS = (1, 2, 3)


@rows("ranks, reduce", [*itertools.product(RANKS, ("sum", "max", "min"))])
def test_all_reduce(tmp_path: Path, ranks: int, reduce: str) -> None:
    given = shards((5, 3), ranks)
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduce].reduce
    write(tmp_path, spmd("AllReduce", f'reduce = "{reduce}"', "n, 3", "n, 3", ranks), groups=whole(ranks))
    same(run(tmp_path, given), [-2 * combine(given)] * ranks)


@rows("ranks, axis", [*itertools.product(RANKS, (0, 1, 2, -1))])
def test_all_gather(tmp_path: Path, ranks: int, axis: int) -> None:
    shape = (2, 5, 3)
    made = [*shape]
    made[axis] *= ranks
    given = shards(shape, ranks)
    write(tmp_path, spmd("AllGather", f"axis = {axis}", text(shape), text(tuple(made)), ranks), groups=whole(ranks))
    same(run(tmp_path, given), [-2 * np.concatenate(given, axis)] * ranks)


@rows("ranks, axis, reduce", [*itertools.product(RANKS, (0, 1, 2, -2), ("sum", "max"))])
def test_reduce_scatter(tmp_path: Path, ranks: int, axis: int, reduce: str) -> None:
    shard = (2, 5, 3)
    shape = [*shard]
    shape[axis] *= ranks
    given = shards(tuple(shape), ranks)
    graphs = spmd("ReduceScatter", f'axis = {axis}, reduce = "{reduce}"', text(tuple(shape)), text(shard), ranks)
    write(tmp_path, graphs, groups=whole(ranks))
    total = {"sum": np.add, "max": np.maximum}[reduce].reduce(given)
    same(run(tmp_path, given), [-2 * part for part in np.split(total, ranks, axis)])


@rows("ranks, split, concat", [(n, *pair) for n in RANKS for pair in (*itertools.product(range(3), range(3)), (-1, 0))])
def test_all_to_all(tmp_path: Path, ranks: int, split: int, concat: int) -> None:
    shape = [2, 5, 3]
    shape[split] *= ranks
    made = list(shape)
    made[split] //= ranks
    made[concat] *= ranks
    given = shards(tuple(shape), ranks)
    attributes = f"split_axis = {split}, concat_axis = {concat}"
    graphs = spmd("AllToAll", attributes, text(tuple(shape)), text(tuple(made)), ranks)
    write(tmp_path, graphs, groups=whole(ranks))
    parts = [np.split(one, ranks, split) for one in given]
    wanted = [np.concatenate([row[rank] for row in parts], concat) for rank in range(ranks)]
    same(run(tmp_path, given), [-2 * one for one in wanted])


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_where_only_the_root_has_it(tmp_path: Path, root: int) -> None:
    graphs = [
        f"""rank{rank} ({f"float[n, 3] x{rank}" if rank == root else ""}) => (float[n, 3] y{rank}) <float[n, 3] k>
        {{ k = partc.comm.Broadcast <group = "all", tag = 3, root = {root}> ({f"x{rank}" if rank == root else ""})
           y{rank} = Neg(k) }}"""
        for rank in range(3)
    ]
    write(tmp_path, graphs, groups=whole(3))
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    with load_local(tmp_path) as program:
        found = program({f"x{root}": x})
    same([np.asarray(found[f"y{rank}"]) for rank in range(3)], [-x] * 3)


@rows("ranks, reduce, type", [*itertools.product(RANKS, ("sum", "max"), ("float", "float16", "int32"))])
def test_reduce_gives_the_root_alone(tmp_path: Path, ranks: int, reduce: str, type: str) -> None:
    """Every rank gives the value that it goes on with; the broadcast hands the root's result to the others only."""
    root = ranks - 1
    graphs = [
        f"""rank{rank} (float[n, 3] x{rank}) => (float[n, 3] y{rank}) <float[n, 3] h{rank}, float[n, 3] k>
        {{ h{rank} = Neg(x{rank})
           {"k" if rank == root else ""} = partc.comm.Reduce <group = "all", tag = 0, root = {root}, reduce = "{reduce}"> (h{rank})
           {"" if rank == root else "k"} = partc.comm.Broadcast <group = "all", tag = 1, root = {root}> ({"k" if rank == root else ""})
           y{rank} = Add(k, h{rank}) }}"""
        for rank in range(ranks)
    ]
    write(tmp_path, [graph.replace("float[", f"{type}[") for graph in graphs], groups=whole(ranks))
    given = shards((5, 3), ranks, BY_NAME[type].numpy)
    assert [*check_artifact(tmp_path)] == []
    with load_local(tmp_path) as program:
        for _ in range(2):
            found = program({f"x{rank}": one for rank, one in enumerate(given)})
    total = functools.reduce({"sum": np.add, "max": np.maximum}[reduce], [-one for one in given])
    same([np.asarray(found[f"y{rank}"]) for rank in range(ranks)], [total - one for one in given])


DTYPES = [name for name in BY_NAME if name not in ("float8e8m0",)]


@rows("op, name", [*itertools.product(("AllReduce", "AllGather", "ReduceScatter", "AllToAll"), DTYPES)])
def test_every_type_moves_and_adds(tmp_path: Path, name: str, op: str) -> None:
    """Values small enough that sums are exact in every type; 3 ranks, along axis 1, so that packing takes part."""
    attributes = {
        "AllReduce": 'reduce = "sum"',
        "AllGather": "axis = 1",
        "ReduceScatter": 'axis = 1, reduce = "sum"',
        "AllToAll": "split_axis = 1, concat_axis = 1",
    }[op]
    graphs = [
        f"rank{rank} ({name}[3, 6] x{rank}) => ({name}[3, k] y)"
        f'{{ y = partc.comm.{op} <group = "all", tag = 0, {attributes}> (x{rank}) }}'.replace(
            "[3, k]", {"AllGather": "[3, 18]", "ReduceScatter": "[3, 2]"}.get(op, "[3, 6]")
        )
        for rank in range(3)
    ]
    write(tmp_path, graphs, groups=whole(3))
    dtype = BY_NAME[name].numpy
    small = (np.arange(18).reshape(3, 6) * 5 % 2).astype(np.float32)
    given = [(small * (rank == 1)).astype(dtype) for rank in range(3)]
    total = small.astype(dtype)
    wanted = {
        "AllReduce": [total] * 3,
        "AllGather": [np.concatenate(given, 1)] * 3,
        "ReduceScatter": np.split(total, 3, 1),
        "AllToAll": [np.concatenate([np.split(one, 3, 1)[rank] for one in given], 1) for rank in range(3)],
    }[op]
    same(run(tmp_path, given), wanted)


def test_narrow_floats_are_added_in_float32_and_rounded_once(tmp_path: Path) -> None:
    given = [np.array([value], ml_dtypes.bfloat16) for value in (256, 1, 1)]
    graphs = [
        f"rank{rank} (bfloat16[n] x{rank}) => (bfloat16[n] y)"
        f'{{ y = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (x{rank}) }}'
        for rank in range(3)
    ]
    same(run(write(tmp_path, graphs, groups=whole(3)), given), [np.array([258], ml_dtypes.bfloat16)] * 3)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 0, 3)])
@pytest.mark.parametrize("axis", [0, 1])
def test_values_of_unknown_shape_are_gathered(tmp_path: Path, lengths: tuple[int, ...], axis: int) -> None:
    """NonZero makes [1, count]: the count is known only when the step runs."""
    given = [np.array([0] * rank + [1] * length, np.float32) for rank, length in enumerate(lengths)]
    graphs = [
        f"""rank{rank} (float[m{rank}] x{rank}) => (int64[a, b] y) <int64[one, count{rank}] h>
        {{ h = NonZero(x{rank})
           y = partc.comm.AllGather <group = "all", tag = 0, axis = {axis}> (h) }}"""
        for rank in range(3)
    ]
    write(tmp_path, graphs, groups=whole(3), shapes={"h": None})
    found = [np.nonzero(one)[0][None] for one in given]
    if axis == 1 or len(set(lengths)) == 1:
        same(run(tmp_path, given), [np.concatenate(found, axis)] * 3)
    else:
        with pytest.raises(RankError, match=r"AllGather of 'y'.*\[1, 2\] on rank 0, \[1, 0\] on rank 1, \[1, 3\]"):
            run(tmp_path, given)


def test_values_of_unknown_shape_are_reduced(tmp_path: Path) -> None:
    graphs = [
        f"""rank{rank} (float[m{rank}] x{rank}) => (int64[1, b] y{rank}) <int64[1, count{rank}] h, int64[1, count] k>
        {{ h = NonZero(x{rank})
           k = partc.comm.AllReduce <group = "all", tag = 0, reduce = "max"> (h)
           y{rank} = Neg(k) }}"""
        for rank in range(2)
    ]
    write(tmp_path, graphs, groups=whole(2), shapes={"h": None})
    same(run(tmp_path, [np.array(one, np.float32) for one in ([1, 0, 1], [0, 0, 1, 0, 9])]), [np.array([[-2, -4]])] * 2)
    with pytest.raises(RankError, match=r"the shapes do not fit together: \[1, 2\] on rank 0, \[1, 1\] on rank 1"):
        run(tmp_path, [np.array(one, np.float32) for one in ([1, 0, 1], [0, 0, 1, 0])])


def test_shape_inference_tells_what_a_node_tells(tmp_path: Path) -> None:
    """The dims that the number of ranks changes stay open."""
    register()
    graph = """rank (float[n, 6] x) => (float[a, b] y)
    { k = partc.comm.AllGather <group = "all", tag = 0, axis = 0> (x)
      p = partc.comm.AllReduce <group = "all", tag = 1, reduce = "sum"> (x)
      t = partc.comm.AllToAll <group = "all", tag = 2, split_axis = 1, concat_axis = 1> (x)
      y = partc.comm.ReduceScatter <group = "all", tag = 3, axis = -1, reduce = "sum"> (p) }"""
    model = onnx.parser.parse_model(HEAD + graph)
    onnx.checker.check_model(model)
    found = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
        for value in (*found.graph.value_info, *found.graph.output)
    }
    opened = shapes["k"].pop(0)
    assert opened != "n"
    assert shapes == {"k": [6], "p": ["n", 6], "t": ["n", 6], "y": ["a", "b"]}


def test_a_collective_overlaps_and_its_memory_is_kept(tmp_path: Path) -> None:
    """What is computed between a collective's beginning and its use neither sees nor harms its memory."""
    graph = """rank (float[n] x) => (float[n] y) <float[n] h, float[n] s, float[n] a, float[n] b, float[n] c>
    { h = Neg(x)
      s = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (h)
      a = Add(x, x)
      b = partc.comm.AllReduce <group = "all", tag = 1, reduce = "max"> (a)
      c = Sub(b, s)
      y = Mul(c, h) }"""
    write(tmp_path, [graph] * 3, groups=whole(3))
    given = shards((301,), 3)
    wanted = [(2 * np.maximum.reduce(given) + np.add.reduce(given)) * -one for one in given]
    same(run(tmp_path, given), wanted)
    same(run_reference(tmp_path, given), wanted)


def test_a_chain_of_reductions_takes_one_place(tmp_path: Path) -> None:
    """An output takes its input's place unless somebody needs the input later: k's and not h's, here."""
    graph = """rank (float[n] x) => (float[n] y) <float[n] h, float[n] k, float[n] p>
    { h = Neg(x)
      k = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (h)
      p = partc.comm.AllReduce <group = "all", tag = 1, reduce = "max"> (k)
      y = Sub(p, h) }"""
    write(tmp_path, [graph] * 2, groups=whole(2))
    with load_local(tmp_path) as program:
        assert program._ranks[0]._program.arenas.aliases == {"p": "k"}
    given = shards((9,), 2)
    same(run(tmp_path, given), [one - given[0] - given[1] for one in given])


def test_a_maximum_with_nan_is_nan_on_every_rank(tmp_path: Path) -> None:
    graphs = spmd("AllReduce", 'reduce = "max"', "n", "n", 3)
    write(tmp_path, graphs, groups=whole(3))
    found = run(
        tmp_path, [np.array([1, np.nan, 3], np.float32), np.array([np.nan, 2, 1], np.float32), np.zeros(3, np.float32)]
    )
    same(found, [np.array([np.nan, np.nan, -6], np.float32)] * 3)


def test_a_failure_and_a_missing_rank_name_the_collective(tmp_path: Path) -> None:
    """Rank 1 fails before the collective; without it, rank 0 waits for it by name."""
    graphs = [
        f"""rank{rank} (float[n] x{rank}, int64[k] i{rank}) => (float[k] y) <float[k] h>
        {{ h = Gather(x{rank}, i{rank})
           y = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (h) }}"""
        for rank in range(2)
    ]
    write(tmp_path, graphs, groups=whole(2))
    x = np.ones(3, np.float32)
    with load_local(tmp_path) as program:
        with pytest.raises(RankError, match=r"rank 1 failed in Gather \(net.h\)"):
            program(x0=x, i0=np.array([0]), x1=x, i1=np.array([9]))
        found = program(x0=x, i0=np.array([0]), x1=x, i1=np.array([2]))
        assert np.asarray(found["y"]).tolist() == [2]
        assert program._ranks[0].describe(1) == "beginning of AllReduce of 'y' in group 'all', ranks 0, 1 (net.y)"
    transport = LocalWorld(2, 0.1).transport(0)
    transport.world.finish(1)
    with pytest.raises(RankError, match="rank 0 waits in AllReduce of 'k' in group 'all', ranks 0, 1"):
        _alone(transport)


def _alone(transport: LocalTransport) -> None:
    call = CollectiveCall("AllReduce", "all", 0, "", "h", "k", "sum")
    dynamic_collective(
        call,
        (0, 1),
        0,
        Tensor.of(np.ones(1, np.float32), BY_NAME["float"]),
        transport,
        WaitCollective(call, (0, 1)).__str__,
    )
