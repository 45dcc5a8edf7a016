"""Reading what a plan says of meshes, groups, cuts and budgets."""

from __future__ import annotations

import itertools
import re
from typing import Any

import onnx_ir as ir
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.plan.groups import axes_of
from partc.compiler.plan.read import Dataset, OutputRule, PlacementRule, Plan, ShardingRule, parse_plan
from partc.compiler.plan.rules import DatasetSpec
from partc.compiler.plan.schema import plan_schema
from partc.compiler.proposal.starting_plan import starting_plan
from ruamel.yaml import YAML

MESH = (("dp", 2), ("tp", 4))
WHOLE = """\
ranks: 8
mesh: {dp: 2, tp: 4}
dataset: {x: [8, 1, 1, 1], y: [dp, null], s: []}
placement:
  conv1: 3
  "layers.[0-5].*": [0, 1, 2, 3]
  "layers.[6-9].*": {tp: 1}
  head: [5, 1]
sharding:
  matmul1: {in: [[2, 4], [4, 1]], out: [[8, 1]]}
  block1:
    in: [[1, 8], null]
    parameters: {dense2.weight: [8, 1]}
    level: 1
  "layers.*.up": colwise
  "layers.*.down": rowwise
  add: {in: [[dp, tp], [[dp, tp], null], [null, 1], [], null]}
outputs:
  y: 0
  z: cut
max_reshard_bytes: 64MB
"""


def said(text: str) -> str:
    with pytest.raises(CompileError) as caught:
        parse_plan(text, "plan.yaml")
    return str(caught.value)


def read(text: str) -> Plan:
    return parse_plan(text, "p")


def test_a_whole_plan() -> None:
    plan = parse_plan(WHOLE, "p")
    assert plan.mesh == MESH
    assert plan.dataset == Dataset(
        "full_batch",
        {
            "x": DatasetSpec((8, 1, 1, 1), "p:3"),
            "y": DatasetSpec((("dp",), ()), "p:3"),
            "s": DatasetSpec((), "p:3"),
        },
        "p:3",
    )
    assert plan.placement == (
        PlacementRule("conv1", (3,), "p:5"),
        PlacementRule("layers.[0-5].*", (0, 1, 2, 3), "p:6", (("tp", 4),)),
        PlacementRule("layers.[6-9].*", (1, 5), "p:7", (("dp", 2),)),
        PlacementRule("head", (5, 1), "p:8"),
    )
    assert plan.sharding == (
        ShardingRule("matmul1", None, ((2, 4), (4, 1)), ((8, 1),), {}, "p:10"),
        ShardingRule("block1", None, ((1, 8), None), None, {"dense2.weight": (8, 1)}, "p:11", level=1),
        ShardingRule("layers.*.up", "colwise", None, None, {}, "p:15"),
        ShardingRule("layers.*.down", "rowwise", None, None, {}, "p:16"),
        ShardingRule("add", None, ((("dp",), ("tp",)), (("dp", "tp"), ()), ((), ()), (), None), None, {}, "p:17"),
    )
    assert plan.outputs == (OutputRule("y", (0,), "p:19"), OutputRule("z", None, "p:20", sharded=True))
    assert plan.max_reshard_bytes == 64_000_000
    assert plan.axes_of(tuple(range(8))) == MESH


def test_a_plan_that_says_nothing_of_cuts() -> None:
    plan = read("ranks: 3\nmesh:\nsharding:\ndataset:\nmax_reshard_bytes:\n")
    assert (plan.mesh, plan.sharding, plan.max_reshard_bytes) == ((), (), None)
    assert plan.dataset == Dataset("full_batch", {}, "p:4")
    assert read("ranks: 3").dataset == Dataset()
    assert read("ranks: 3\ndataset: data_parallel").dataset == Dataset("data_parallel", {}, "p:2")
    for word in ("cut", "sharded"):
        assert read(f"ranks: 3\noutputs: {word}").outputs == (OutputRule("**", None, "p:2", sharded=True),)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1.5GB", 1_500_000_000),
        ("512 KiB", 524_288),
        ("7B", 7),
        ("2TB", 2 * 10**12),
        ("64mb", 64_000_000),
        ("64M", 64_000_000),
    ],
)
def test_sizes_in_bytes(text: str, count: int) -> None:
    assert read(f"ranks: 2\nmax_reshard_bytes: {text}\n").max_reshard_bytes == count


@pytest.mark.parametrize("text", ["MB", "1e3", "-1", "true", "[1]", "64 MBs"])
def test_what_is_no_size(text: str) -> None:
    assert "a size is a number of bytes, or a text such as 64MB" in said(f"ranks: 2\nmax_reshard_bytes: {text}\n")


@pytest.mark.parametrize("mesh", [(("a", 2), ("b", 3)), (("a", 2), ("one", 1), ("b", 2), ("c", 3)), (("a", 7),)])
def test_every_slice_is_the_ranks_with_its_coordinates(mesh: tuple[tuple[str, int], ...]) -> None:
    """By the row-major numbering of all ranks, for every choice of fixed axes and of their indices."""
    ranks = 1
    for _, size in mesh:
        ranks *= size
    numbered = list(itertools.product(*(range(size) for _, size in mesh)))
    head = f"ranks: {ranks}\nmesh: {{{', '.join(f'{name}: {size}' for name, size in mesh)}}}\n"
    for choice in itertools.product(*([None, *range(size)] for _, size in mesh)):
        fixed = {name: index for (name, _), index in zip(mesh, choice, strict=True) if index is not None}
        if not fixed:
            continue
        slice_ = ", ".join(f"{name}: {index}" for name, index in reversed(fixed.items()))
        (rule,) = read(f"{head}placement: {{m: {{{slice_}}}}}\n").placement
        expected = tuple(
            rank
            for rank, at in enumerate(numbered)
            if all(c is None or a == c for a, c in zip(at, choice, strict=True))
        )
        assert rule.ranks == expected
        inside = tuple(axis for axis, index in zip(mesh, choice, strict=True) if index is None)
        assert rule.axes == (inside if len(expected) > 1 else ())
        varying = tuple(axis for axis in rule.axes if axis[1] > 1)
        assert tuple(axis for axis in axes_of(mesh, ranks, expected) if axis[1] > 1) == varying


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), MESH),
        ((4, 5, 6, 7), (("tp", 4),)),
        ((2, 6), (("dp", 2),)),
        ((5, 4, 6, 7), ()),
        ((6, 2), ()),
        ((0, 1), ()),
        ((0, 1, 4, 5), ()),
        ((3,), ()),
    ],
)
def test_a_list_that_is_a_slice_has_its_axes(group: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> None:
    (rule,) = read(f"ranks: 8\nmesh: {{dp: 2, tp: 4}}\nplacement: {{m: {list(group)}}}\n").placement
    assert (rule.ranks, rule.axes) == (group, axes)


def test_a_mesh_of_every_group() -> None:
    plan = read("ranks: 9\nmesh: {dp: 2, tp: 2}\nplacement: {a: [0, 1, 2, 3], b: [7, 5, 4, 6], c: 8, d: [2]}\n")
    assert [rule.axes for rule in plan.placement] == [(("dp", 2), ("tp", 2))] * 2 + [(), ()]
    assert plan.axes_of((0, 1)) == ()
    law = "  a mesh is the grid of all ranks, or, where it has another size, of every group in 'placement'\n"
    assert said("ranks: 9\nmesh: {dp: 2, tp: 2}\nplacement:\n  a: [0, 1, 2, 3]\n  b: [4, 5, 6]\n  c: {dp: 0}\n") == (
        "plan.yaml:5: placement of 'b': a group of 3 ranks, but the mesh dp=2 x tp=2 has 4\n"
        + law
        + "  help: name 4 ranks, or give a mesh of all 9 ranks and slices of it\n"
        "plan.yaml:6: placement of 'c': a slice of the mesh dp=2 x tp=2, which has 4 of 9 ranks\n"
        + law
        + "  help: name the ranks in a list"
    )
    assert said("ranks: 8\nmesh: {dp: 2, tp: 3}\n") == (
        "plan.yaml:2: 'mesh': the mesh dp=2 x tp=3 has 6 ranks, but there are 8 ranks\n"
        + law
        + "  help: choose sizes that multiply to 8, or set 'ranks' to 6"
    )
    assert "but there are 8 ranks and groups of 3, 2\n" in said(
        "ranks: 8\nmesh: {dp: 2, tp: 3}\nplacement: {a: [0, 1, 2], b: [3, 4], c: [5, 6, 7]}\n"
    )


def test_all_problems_are_said_at_once_in_the_order_of_lines() -> None:
    text = """\
ranks: 8
mesh: {dp: 2, tp: 4}
dataset:
  x: [0, dp]
  y: [[dp, dp], tp]
  z: 8
placement:
  a: {pp: 0}
  b: {dp: 2}
  c: {}
  d: {dp: [0]}
  e: [0, 9]
  f: [1, 1]
  g: []
sharding:
  h: colwize
  i: {}
  j:
  k: {inn: [[2]]}
  l: {in: [2, 4]}
  m: {in: [[2, 4], 4]}
  n: {in: [[dp, tp], [4, 1]]}
  o: {in: [[2, null]]}
  p: {in: [[dp, pp], [true, 2.5]]}
  q: {in: [[dp, [dp]]], level: 3}
  r: {in: [], parameters: {w: [8, -1], v: 3}}
  "s[": colwise
  t: {in: [[[2, 4], 1]]}
  u: {in: [[2, 1]], parameters: {w: [tp, null]}}
  v: 3
outputs: {y: cutt}
"""
    slice_law = "  a slice of the mesh fixes the coordinate of one or more of its axes: {pp: 1}\n"
    axes = "  the mesh has the axes dp, tp"
    shard_law = (
        "  a dim is cut into a number of shards, along a mesh axis, or along a list of them, major first; "
        "null: not at all"
    )
    nothing = (
        "the rule is empty\n  a rule is colwise, rowwise, replicate or pull, or has 'in', 'out' or 'parameters'\n"
        "  help: write {in: [[2, 4], null]}, or remove the line"
    )
    mixed = (
        "  a rule is spelled by mesh axes or by numbers of shards, not by both\n"
        "  help: beside mesh axes, 1 and null are an unsharded dim"
    )
    twice = "the axis 'dp' cuts twice\n  a mesh axis shards one dim of a value, once"
    assert said(text).split("\nplan.yaml:") == [
        "plan.yaml:4: dataset of 'x', dim 0: expected at least 1 shard, but got 0\n"
        "  help: write 1 for an unsharded dim",
        f"5: dataset of 'y': {twice}",
        "6: dataset of 'z': expected an entry for each dim, such as [2, 4], but got the number 8",
        f"8: placement of 'a': 'pp' is not an axis of the mesh\n{axes}",
        "9: placement of 'b': index 2 along 'dp', whose size is 2\n  help: choose an index from 0 to 1",
        f"10: placement of 'c': the slice fixes no axis\n{slice_law}  help: name one of dp, tp, or leave the line out",
        f"11: placement of 'd': expected an index along 'dp', but got a list\n{slice_law.rstrip()}",
        "12: placement of 'e': rank 9, but there are 8 ranks\n"
        "  help: choose a rank from 0 to 7, or set 'ranks' to at least 10",
        "13: placement of 'f': rank 1 is in the list twice\n  help: name every rank once",
        "14: placement of 'g': the list of ranks is empty\n  help: name a rank, or leave the line out for all ranks",
        "16: sharding of 'h': 'colwize' is not a style\n  a rule is a style, or a strategy such as {in: [[2, 4], null]}\n"
        "  help: the nearest is 'colwise'",
        f"17: sharding of 'i': {nothing}",
        f"18: sharding of 'j': {nothing}",
        "19: sharding of 'k': unknown key 'inn'\n  help: the nearest is 'in'",
        "20: sharding of 'l', 'in': the list has dims where it should have tensors\n"
        "  a strategy has a list for each tensor, with an entry for each dim\n"
        "  help: write one more pair of brackets: [[2, 4]] for one tensor",
        "21: sharding of 'm', input 1: expected an entry for each dim, such as [2, 4], but got the number 4",
        f"22: sharding of 'n': the axis 'dp' and 4 shards are in one rule\n{mixed}",
        "23: sharding of 'o', input 0: null is used beside 2 shards\n"
        "  null is an unsharded dim beside mesh axes; in place of a tensor's list it means derived\n"
        "  help: write 1 for an unsharded dim",
        f"24: sharding of 'p', input 0, dim 1: 'pp' is not an axis of the mesh\n{axes}",
        f"24: sharding of 'p', input 1, dim 0: expected a number of shards or a mesh axis, but got true\n{shard_law}",
        f"24: sharding of 'p', input 1, dim 1: expected a number of shards or a mesh axis, but got the number 2.5\n"
        f"{shard_law}",
        f"25: sharding of 'q', input 0: {twice}",
        "25: sharding of 'q', 'level': expected 0, 1 or 2, but got the number 3",
        "26: sharding of 'r', 'in': the list is empty\n  a strategy has an entry for each tensor; null derives it",
        "26: sharding of 'r', parameter 'w', dim 1: expected at least 1 shard, but got -1\n"
        "  help: write 1 for an unsharded dim",
        "26: sharding of 'r', parameter 'v': expected an entry for each dim, such as [2, 4], but got the number 3",
        "27: sharding of 's[': not a valid pattern: '[' has no ']'; '\\[' is the character itself",
        f"28: sharding of 't', input 0, dim 0: a list within a cut is of mesh axes, but has the number 2\n{shard_law}\n"
        "  help: write the product of the numbers",
        f"29: sharding of 'u': the axis 'tp' and 2 shards are in one rule\n{mixed}",
        "30: sharding of 'v': expected a mapping, 'key: value' on each line, but got the number 3",
        "31: delivery of 'y': expected a rank, a list of ranks, 'producer' or 'sharded', but got the string 'cutt'",
    ]


def test_an_axis_cuts_a_value_once() -> None:
    head = "ranks: 8\nmesh: {dp: 2, tp: 4}\n"
    law = "a mesh axis shards one dim of a value, once"
    assert said(f"{head}dataset:\n  x: [[dp, dp], tp]\n") == (
        f"plan.yaml:4: dataset of 'x': the axis 'dp' cuts twice\n  {law}"
    )
    assert said(f"{head}sharding: {{q: {{in: [[tp, [tp]]]}}}}\n").endswith(
        f"'q', input 0: the axis 'tp' cuts twice\n  {law}"
    )
    assert read(f"{head}sharding: {{q: {{in: [[tp], [tp]]}}}}\n").sharding[0].inputs == ((("tp",),), (("tp",),))


@pytest.mark.parametrize(
    ("mesh", "fact"),
    [
        ("{dp: 0}", "mesh axis 'dp': expected at least 1, but got 0"),
        ("{dp: a}", "mesh axis 'dp': expected an integer, but got the string 'a'"),
        ("{3x: 2}", "mesh axis '3x': this is no name"),
        ("[2, 4]", "'mesh': expected a mapping, 'key: value' on each line, but got a list"),
    ],
)
def test_a_wrong_mesh_is_not_blamed_on_those_who_name_its_axes(mesh: str, fact: str) -> None:
    message = said(f"ranks: 2\nmesh: {mesh}\nplacement: {{a: {{dp: 0}}}}\nsharding: {{b: {{in: [[dp]]}}}}\n")
    assert message.startswith(f"plan.yaml:2: {fact}")
    assert "dp=" not in message
    assert "placement" not in message or "3x" in mesh


def test_names_without_a_mesh() -> None:
    assert (
        said("ranks: 2\nsharding: {b: {in: [[dp, tp]]}}\n").count("not an axis of the mesh\n  there is no mesh\n") == 2
    )


def test_cuts_of_one_whole_dims_have_either_spelling() -> None:
    rules = read(
        "ranks: 2\nsharding: {a: {in: [[1, 1]]}, b: {in: [[1, null]]}, c: {in: [[]]}, d: {in: [null]}}\n"
    ).sharding
    assert [rule.inputs for rule in rules] == [((1, 1),), (((), ()),), ((),), (None,)]


def allows(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a JSON schema, of the keywords that the plan's has, allows the value."""
    if "$ref" in schema:
        return allows(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(allows(one, value, root) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool) is not (schema["type"] == "boolean"):
        return False
    match value:
        case dict():
            named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
            inside = [(named.get(key, other), item) for key, item in value.items()]
            return (
                len(value) >= schema.get("minProperties", 0)
                and set(schema.get("required", ())) <= set(value)
                and all(one is True or (one is not False and allows(one, item, root)) for one, item in inside)
            )
        case list():
            enough = len(value) >= schema.get("minItems", 0)
            return enough and all(allows(schema["items"], item, root) for item in value)
        case str():
            return re.search(schema.get("pattern", ""), value) is not None
        case int():
            return value >= schema.get("minimum", value)
    return True


def test_the_schema_takes_what_the_reader_takes() -> None:
    schema = plan_schema()
    yaml = YAML(typ="safe", pure=True)
    assert allows(schema, yaml.load(WHOLE), schema)
    for text in (
        "mesh: {a: 0}",
        "dataset: full",
        "dataset: {x: 8}",
        "placement: {a: {}}",
        "placement: {a: []}",
        "sharding: {a: colwize}",
        "sharding: {a: {inn: []}}",
        "sharding: {a: {in: [2]}}",
        "sharding: {a: {level: 3}}",
        "outputs: {a: cutt}",
        "max_reshard_bytes: 64mb",
    ):
        assert not allows(schema, yaml.load(f"ranks: 2\n{text}"), schema), text


@pytest.mark.parametrize(
    ("op", "attributes", "left", "right", "cut"),
    [
        ("MatMul", {}, [5, 4], [4, 6], "[[1, 2], [2, 1]]"),
        ("MatMul", {}, [3, 5, 4], [4, 6], "[[1, 1, 2], [2, 1]]"),
        ("Gemm", {"transB": 1}, [5, 4], [6, 4], "[[1, 2], [1, 2]]"),
        ("Gemm", {"transA": 1}, [4, 5], [4, 6], "[[2, 1], [2, 1]]"),
    ],
)
def test_the_starting_plan_shows_cuts_that_are_right(
    op: str, attributes: dict[str, int], left: list[int], right: list[int], cut: str
) -> None:
    a = ir.val("a", ir.DataType.FLOAT, left)
    b = ir.val("b", ir.DataType.FLOAT, right)
    node = ir.node(op, [a, b], attributes=attributes)
    graph = ir.Graph([a, b], node.outputs, nodes=[node], opset_imports={"": 20}, name="g")
    graph.outputs[0].name = "out"
    text = starting_plan(ir.Model(graph, ir_version=10), {node: "up.mm"}, "m")
    assert f"\n#   up.mm: {{in: {cut}}}\n" in text
    block = text[text.index("# mesh:") : text.index("# outputs:")].replace("\n# ", "\n").removeprefix("# ")
    plan = parse_plan("ranks: 8\n" + block, "p")
    assert plan.mesh == MESH
    assert [rule.pattern for rule in plan.sharding] == ["up", "up.mm"]
    assert plan.sharding[0].style == "colwise"
