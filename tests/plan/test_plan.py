"""Reading plans: what they give, what is said of wrong ones, and the schema."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.read import (
    DimRules,
    InputRule,
    OutputRule,
    PlacementRule,
    Plan,
    SymbolRule,
    parse_plan,
    read_plan,
)
from partc.compiler.plan.schema import plan_schema
from partc.compiler.plan.training.losses import LOSSES
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS

WHOLE = """\
ranks: 5

symbols:
  batch: {divisor: 8, max: 512}
  seq:
    min: 3
    unique: true
  any:
inputs:
  x: [batch, 1, 28, null]
  "tokens:0":
    - batch
    - a.b
  scalar: []
placement:
  conv1: 3
  "layers.[0-5].*": 4
  conv1.Relu: 0
  1: 0
outputs:
  y: 0
  "aux*": [2, 0]
  kept: producer
"""


RANKS = "\n  help: begin with the number of ranks, 'ranks: 2'"


def said(text: str) -> str:
    with pytest.raises(CompileError) as caught:
        parse_plan(text, "plan.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_whole_plan() -> None:
    assert parse_plan(WHOLE, "a/plan.yaml") == Plan(
        file="a/plan.yaml",
        ranks=5,
        dims=DimRules(
            symbols={
                "batch": SymbolRule(Symbol(divisor=8, max=512), "a/plan.yaml:4"),
                "seq": SymbolRule(Symbol(min=3, unique=True), "a/plan.yaml:5"),
                "any": SymbolRule(Symbol(), "a/plan.yaml:8"),
            },
            inputs={
                "x": InputRule(("batch", 1, 28, None), "a/plan.yaml:10"),
                "tokens:0": InputRule(("batch", "a.b"), "a/plan.yaml:11"),
                "scalar": InputRule((), "a/plan.yaml:14"),
            },
        ),
        placement=(
            PlacementRule("conv1", (3,), "a/plan.yaml:16"),
            PlacementRule("layers.[0-5].*", (4,), "a/plan.yaml:17"),
            PlacementRule("conv1.Relu", (0,), "a/plan.yaml:18"),
            PlacementRule("1", (0,), "a/plan.yaml:19"),
        ),
        outputs=(
            OutputRule("y", (0,), "a/plan.yaml:21"),
            OutputRule("aux*", (0, 2), "a/plan.yaml:22"),
            OutputRule("kept", None, "a/plan.yaml:23"),
        ),
    )


def test_a_plan_does_not_change() -> None:
    plan = parse_plan("ranks: 2\n", "p")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.ranks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "ranks"), [("outputs: 1", (1,)), ("outputs: [2, 0]", (0, 2)), ("outputs: producer", None)]
)
def test_one_value_for_all_outputs(text: str, ranks: tuple[int, ...] | None) -> None:
    (rule,) = parse_plan(f"ranks: 3\n{text}\n", "p").outputs
    assert rule == OutputRule("**", ranks, "p:2")
    assert compile_pattern(rule.pattern).matches("any.output")


def test_empty_sections_and_the_whole_model() -> None:
    plan = parse_plan("ranks: 1\nsymbols:\ninputs:\nplacement:\noutputs:\n", "")
    assert plan == Plan.whole()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.yaml:1: the plan is empty\n  help: begin with 'ranks: 2'"),
        ("# only\n# comments\n", "plan.yaml:1: the plan is empty\n  help: begin with 'ranks: 2'"),
        ("- ranks\n", "plan.yaml:1: a plan is a mapping, but this is a list\n  help: begin with 'ranks: 2'"),
        (
            "ranks:2\n",
            "plan.yaml:1: a plan is a mapping, but this is the string 'ranks:2'\n  help: begin with 'ranks: 2'",
        ),
        ("placement: {a: 1}", "plan.yaml:1: 'ranks' is missing\n  help: begin with the number of ranks, 'ranks: 2'"),
        ("ranks: two", f"plan.yaml:1: 'ranks': expected an integer, but got the string 'two'{RANKS}"),
        ("ranks: true", f"plan.yaml:1: 'ranks': expected an integer, but got true{RANKS}"),
        ("ranks: 2.0", f"plan.yaml:1: 'ranks': expected an integer, but got the number 2.0{RANKS}"),
        ("ranks:", f"plan.yaml:1: 'ranks': expected an integer, but got nothing{RANKS}"),
        ("ranks: 0", f"plan.yaml:1: 'ranks': expected at least 1, but got 0{RANKS}"),
        (
            "ranks: 1\nplacement: [a]",
            "plan.yaml:2: 'placement': expected a mapping, 'key: value' on each line, but got a list\n"
            "  help: write placement: {conv1: 0, fc: 1}",
        ),
        (
            "ranks: 1\n\tx: 2\n",
            "plan.yaml:2: this is not YAML: while scanning for the next token: found character '\\t' that cannot start any "
            "token\n  help: indent with spaces, YAML does not allow tabs",
        ),
        (
            "ranks: 1\nplacement:\n  *.x: 0\n",
            "plan.yaml:3: this is not YAML: found undefined alias '.x:'\n"
            "  help: put quotes around a pattern that begins with '*': \"*.mlp\": 3",
        ),
        ("ranks: 1\nranks: 2\n", "plan.yaml:2: 'ranks' is given twice, first in line 1\n  help: keep one of them"),
        ("ranks: 1\n\x00", "plan.yaml:2: the character U+0000 is not allowed in YAML\n  help: remove it"),
        ("ranks: !!set 1", "plan.yaml:1: the tag '!!set' is not used in plans\n  help: remove it"),
        (
            "ranks: 1\nplacement: &p\n  a: *p\n",
            "plan.yaml:3: an alias is inside the value that it refers to\n  help: write it out",
        ),
        ("ranks: 1\n<<: {a: 1}\n", "plan.yaml:2: '<<' is not used in plans\n  help: write the keys out"),
        (
            "ranks: 1\n? [a]\n: 1\n",
            "plan.yaml:2: a key is a string, not a list or a mapping\n  help: put quotes around it",
        ),
        ("[" * 1000, "plan.yaml:1: lists and mappings are nested too deeply to be read"),
    ],
)
def test_files_that_are_no_plan(text: str, message: str) -> None:
    assert said(text) == message


def test_aliases_of_aliases_end() -> None:
    lines = ["ranks: 1", "a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.thread_time()
    message = said("\n".join(lines))
    assert message.count("the aliases up to here expand to more than 100000 values\n  help: write them out") == 1
    assert time.thread_time() - start < 5


def test_an_alias_is_what_its_anchor_has() -> None:
    plan = parse_plan(
        "ranks: 4\nplacement:\n  a: &first [0, 1]\n  b: *first\n  c: *first\n"
        "sharding:\n  a: &cut {in: [[2, 1]]}\n  b: *cut\n",
        "plan.yaml",
    )
    assert [rule.ranks for rule in plan.placement] == [(0, 1)] * 3
    assert [rule.where for rule in plan.placement] == [f"plan.yaml:{line}" for line in (3, 4, 5)]
    assert [rule.inputs for rule in plan.sharding] == [((2, 1),)] * 2


def test_all_problems_are_said_at_once_in_the_order_of_lines() -> None:
    text = """\
ranks: 4
rank: 3
train: {}
symbols:
  batch: {divisor: 8, max: 12, divisr: 3}
  b:
    divisor: 8
    remainder: 9
  c:
    divisor: 8
    max: 3
  3x: {}
  d: {min: 0, unique: 1}
  e: 5
inputs:
  x: 3
  y: [-1, 2*batch, true]
  y: [1]
placement:
  conv1: 4
  conv2: a
  conv3: [1, 4]
  conv4: {pp: 1}
  "conv[a1]": 1
  c5: -1
  c7:
outputs:
  a: [1, 1]
  b: []
  c: prod
  d:
    - 0
    - 7
"""
    dim = "  a dim is a size, the name of a symbol or of a free dim, or null where nothing is said"
    assert said(text) == "\n".join(
        [
            "plan.yaml:2: unknown key 'rank'\n  help: the nearest is 'ranks'",
            "plan.yaml:3: 'train': 'loss' is missing\n"
            "  help: write loss: {type: softmax_cross_entropy, logits: logits, labels: label}, or the name of a scalar output",
            "plan.yaml:3: 'train': 'optimizer' is missing\n  help: write optimizer: {type: momentum, lr: 0.01, momentum: 0.9}",
            "plan.yaml:5: symbol 'batch': unknown key 'divisr'\n  help: the nearest is 'divisor'",
            "plan.yaml:8: symbol 'b': For 'Symbol', the 'remainder' value should be in the range '[0, 8)', but got 9",
            "plan.yaml:11: symbol 'c': For 'Symbol', the 'max' value should be 0 (no maximum) or at least 8, the smallest "
            "size that min=1, divisor=8 and remainder=0 allow, but got 3",
            "plan.yaml:12: symbol '3x': this is no name\n"
            "  a symbol's name has letters, digits and '_', and no digit first",
            "plan.yaml:13: symbol 'd', 'min': expected at least 1, but got 0",
            "plan.yaml:13: symbol 'd', 'unique': expected true or false, but got the number 1",
            "plan.yaml:14: symbol 'e': expected a mapping, 'key: value' on each line, but got the number 5",
            "plan.yaml:16: input 'x': expected a list of dims such as [batch, 1, 28, 28], but got the number 3",
            f"plan.yaml:17: input 'y', dim 0: the size -1 is negative\n{dim}\n"
            "  help: name a dynamic dim, or write null",
            f"plan.yaml:17: input 'y', dim 1: '2*batch' is no name\n{dim}\n"
            "  help: a name has letters, digits, '_' and '.', and no digit first",
            f"plan.yaml:17: input 'y', dim 2: expected a dim, but got true\n{dim}",
            "plan.yaml:18: 'y' is given twice, first in line 17\n  help: keep one of them",
            "plan.yaml:20: placement of 'conv1': rank 4, but there are 4 ranks\n"
            "  help: choose a rank from 0 to 3, or set 'ranks' to at least 5",
            "plan.yaml:21: placement of 'conv2': expected a rank, an integer, but got the string 'a'",
            "plan.yaml:22: placement of 'conv3': rank 4, but there are 4 ranks\n"
            "  help: choose a rank from 0 to 3, or set 'ranks' to at least 5",
            "plan.yaml:23: placement of 'conv4': a slice of the mesh, but there is no mesh\n"
            "  a slice of the mesh fixes the coordinate of one or more of its axes: {pp: 1}\n"
            "  help: declare 'mesh: {pp: 2, tp: 4}'",
            "plan.yaml:24: placement of 'conv[a1]': not a valid pattern: '[a1]' is neither a range of numbers such as "
            "[0-5,7] nor characters such as [qkv] or [a-f]; {q,1} is one of several texts, '\\[' the character itself",
            "plan.yaml:25: placement of 'c5': rank -1, but there are 4 ranks\n  help: choose a rank from 0 to 3",
            "plan.yaml:26: placement of 'c7': expected a rank, an integer, but got nothing",
            "plan.yaml:28: delivery of 'a': rank 1 is in the list twice\n  help: name every rank once",
            "plan.yaml:29: delivery of 'b': the list of ranks is empty\n"
            "  help: write 'producer' for an output that stays where it is computed",
            "plan.yaml:30: delivery of 'c': expected a rank, a list of ranks, 'producer' or 'sharded', but got the string "
            "'prod'",
            "plan.yaml:31: delivery of 'd': rank 7, but there are 4 ranks\n"
            "  help: choose a rank from 0 to 3, or set 'ranks' to at least 8",
        ]
    )


def test_ranks_are_checked_against_no_wrong_number() -> None:
    message = said("ranks: many\nplacement: {a: 7, b: -2}\n")
    assert "rank 7" not in message
    assert (
        "plan.yaml:2: placement of 'b': rank -2, but there are no negative ranks\n  help: choose a rank from 0"
        in message
    )


@pytest.mark.parametrize(("text", "value"), [("0x1f", 31), ("0o17", 15), ("012", 12), ("+3", 3), ("1_000", 1000)])
def test_integers_are_yaml_integers(text: str, value: int) -> None:
    assert parse_plan(f"ranks: {text}", "p").ranks == value


def test_reading_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbfranks: 3\r\nplacement:\r\n  a: 2\r\n")
    assert read_plan(path).placement == (PlacementRule("a", (2,), f"{path}:3"),)
    path.write_bytes(b"ranks: 3\n# caf\xe9\n")
    with pytest.raises(CompileError) as caught:
        read_plan(path)
    assert str(caught.value) == f"{path}:2: the byte 0xe9 is not UTF-8\n  help: save the plan as UTF-8 text"
    with pytest.raises(CompileError, match="no such plan file"):
        read_plan(tmp_path / "none.yaml")
    with pytest.raises(CompileError, match="the plan cannot be read"):
        read_plan(tmp_path)


def test_the_schema_is_one_for_editors() -> None:
    schema = plan_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "partc plan"
    assert list(schema["properties"]) == [
        "ranks",
        "mesh",
        "roles",
        "symbols",
        "inputs",
        "batch_dims",
        "dataset",
        "dataset_strategy",
        "full_batch",
        "placement",
        "sharding",
        "experts",
        "parameters",
        "stored",
        "outputs",
        "target",
        "max_reshard_bytes",
        "train",
        "precision",
        "messages",
        "quantize",
        "adapters",
        "context",
        "generate",
        "pipeline",
        "elastic",
    ]
    assert schema["required"] == ["ranks"]
    assert schema["additionalProperties"] is False
    inside = [schema["$defs"][name]["properties"] for name in ("SymbolEntry", "ShardingEntry")]
    for properties in (schema["properties"], *inside):
        assert all(entry["description"].endswith(".") for entry in properties.values())
    assert {"type": "null"} in schema["properties"]["placement"]["anyOf"]


def test_the_schema_knows_the_options_of_every_loss_optimizer_schedule_and_metric() -> None:
    schema = plan_schema()
    properties = schema["$defs"]["TrainRules"]["properties"]

    def types(forms: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        inner = [one for form in forms for one in form.get("oneOf", [form])]
        named = [schema["$defs"][one["$ref"].rpartition("/")[2]] for one in inner if "$ref" in one]
        found = {}
        for one in named:
            kind = one["properties"]["type"]
            kinds = kind.get("enum") or [kind["const"]] if "anyOf" not in kind else kind["anyOf"][0]["enum"]
            found |= dict.fromkeys(kinds, one)
        return found

    losses, optimizers, schedules = (types(properties[key]["anyOf"]) for key in ("loss", "optimizer", "schedule"))
    assert LOSSES.keys() <= losses.keys()
    assert optimizers.keys() == OPTIMIZERS.keys()
    for name, kind in OPTIMIZERS.items():
        assert optimizers[name]["properties"].keys() - {"type", "shard", "target"} == kind.options.keys()
        assert optimizers[name]["required"] == ["type", "lr"]
        assert optimizers[name]["additionalProperties"] is False
    assert losses["cross_entropy"]["required"] == ["type", "logits", "labels"]
    assert losses["cross_entropy"]["additionalProperties"] is False
    assert optimizers["adam"]["properties"]["betas"]["default"] == [0.9, 0.999]
    assert schedules["cosine"]["required"] == ["type", "steps"]
    named = types(properties["metrics"]["anyOf"][2]["additionalProperties"]["anyOf"])
    assert named.keys() >= {"accuracy", "mse", "top_k", "auc"}
    own = schema["$defs"]["ParameterRule"]["properties"]["optimizer"]["anyOf"]
    assert types(own)["adam"]["required"] == ["type"]
    assert types(own)["adam"]["properties"].keys().isdisjoint({"shard", "target"})
