"""Legal plans, drawn from the schema that `partc schema` prints: every key, with empty mappings, zeros, extremes and the model's own names.

    python tests/fuzz/schema_plans.py --cases 500 --seed 1

The compile refuses a plan with a message for the user, or `partc check` and the loading of the artifact accept what it wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from pathlib import Path
from typing import Any, TypeAlias

from partc.cli.main import invoke
from partc.compiler.plan.schema import plan_schema
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import PartcError
from pool import Wrong, main
from small import model

Schema: TypeAlias = dict[str, Any]

NODES = ["up", "shift", "act", "down", "last", "**", "u*"]
WORDS = {
    "placement": NODES,
    "sharding": NODES,
    "recompute": NODES,
    "nodes": NODES,
    "target": NODES,
    "keep": NODES,
    "parameters": ["v", "b", "w", "c", "*", "{v,w}"],
    "inputs": ["x"],
    "dataset": ["x"],
    "symbols": ["n"],
    "outputs": ["y"],
    "roles": ["ps"],
    "mesh": ["dp", "tp"],
    "data": ["x", "label"],
    "test": ["x", "label"],
    "metrics": ["accuracy"],
    "logits": ["y"],
    "prediction": ["y"],
    "labels": ["label"],
    "target_": ["label"],
    "shard": ["dp"],
}
"""What a text, or a key of a mapping, may be under a key of the plan."""
TEXTS = ["x", "y", "n", "dp", "tp", "up", "1 microbatch", "64MB", "", "a.npz", "cpu", "colwise"]
NUMBERS = [0, 1, 2, 3, 4, 5, 6, 12, -1, 64, 1000, 2**31, 2**40]
FLOATS = [0.0, 1.0, 0.5, 0.01, 1e-8, 1e-320, 1e30, 0.999999]
BASES: list[Schema] = [
    {"ranks": 2},
    {"ranks": 4, "mesh": {"dp": 2, "tp": 2}, "dataset": "data_parallel", "symbols": {"n": {"divisor": 4}}},
    {"ranks": 2, "symbols": {"n": {"divisor": 12}}, "dataset": "data_parallel"},
]
LOSSES: list[Schema] = [
    {"type": "softmax_cross_entropy", "logits": "y", "labels": "label"},
    {"type": "mean_squared", "prediction": "y", "target": "label"},
]


class Drawn:
    """Values of a JSON schema."""

    def __init__(self, chance: random.Random, schema: Schema) -> None:
        self.chance, self.definitions = chance, schema.get("$defs", {})

    def value(self, schema: Schema, key: str, depth: int = 0) -> Any:
        """A value that the schema allows, under a key of the plan."""
        chance = self.chance
        if "$ref" in schema:
            return self.value(self.definitions[schema["$ref"].rpartition("/")[2]], key, depth)
        for choices in ("anyOf", "oneOf"):
            if choices in schema:
                return self.value(chance.choice(schema[choices]), key, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return chance.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self.mapping(schema, key, depth)
            case "array":
                if "prefixItems" in schema:
                    return [self.value(one, key, depth + 1) for one in schema["prefixItems"]]
                count = chance.choice([0, 1, 1, 2, 2, 3]) if depth < 5 else 0
                return [self.value(schema.get("items", {}), key, depth + 1) for _ in range(count)]
            case "integer":
                low, high = schema.get("minimum", -(2**62)), schema.get("maximum", 2**62)
                low, high = max(low, schema.get("exclusiveMinimum", low - 1) + 1), high
                fitting = [number for number in NUMBERS if low <= number <= high]
                return chance.choice([*fitting, *[number for number in (low, high) if abs(number) < 2**40]] or [low])
            case "number":
                low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e30)), schema.get("maximum", 1e30)
                return chance.choice([number for number in [*FLOATS, 2, 1] if low <= number <= high])
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
            case "string":
                return chance.choice(WORDS.get(key, TEXTS) if chance.random() < 0.8 else TEXTS)
        return chance.choice([0, 1, "x", [], {}, None, 0.5, True])

    def mapping(self, schema: Schema, key: str, depth: int) -> Schema:
        """A mapping with what it must have, and some of what it may have."""
        chance, known = self.chance, schema.get("properties", {})
        must = schema.get("required", [])
        found = {
            name: self.value(one, name, depth + 1)
            for name, one in known.items()
            if name in must or chance.random() < 1.5 / (len(known) + 1)
        }
        if isinstance(more := schema.get("additionalProperties"), dict):
            for _ in range(chance.choice([0, 1, 1, 2])):
                found[chance.choice(WORDS.get(key, TEXTS))] = self.value(more, key, depth + 1)
        return found


def plan_of(chance: random.Random) -> Schema:
    """A small plan, with one to three keys drawn anew, at the top or within `train`."""
    schema = plan_schema()
    drawn = Drawn(chance, schema)
    plan: Schema = json.loads(json.dumps(chance.choice(BASES)))
    if chance.random() < 0.6:
        plan["train"] = {
            "loss": chance.choice(LOSSES),
            "optimizer": chance.choice([{"type": "sgd", "lr": 0.1}, {"type": "adam", "lr": 0.01}]),
        }
    entry = drawn.definitions["TrainRules"]
    for _ in range(chance.choice([1, 1, 2, 3])):
        if "train" in plan and chance.random() < 0.7:
            owner, known = plan["train"], entry["properties"]
        else:
            owner, known = plan, {name: one for name, one in schema["properties"].items() if name != "train"}
        name = chance.choice(sorted(known))
        owner[name] = drawn.value(known[name], name)
    return plan


def work(chance: random.Random, folder: Path) -> str:
    """Compiles the model by such a plan, checks and loads the artifact."""
    (folder / "model.onnx").write_bytes(model())
    (folder / "plan.yaml").write_text(json.dumps(plan_of(chance), indent=1))
    said, build = io.StringIO(), folder / "build"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = invoke(["compile", str(folder / "model.onnx"), "--plan", str(folder / "plan.yaml"), "-o", str(build)])
    text = said.getvalue()
    plan = (folder / "plan.yaml").read_text()
    if code:
        if "Traceback" not in text and "a bug in partc" not in text and code == 2:
            return text
        raise Wrong(f"exit code {code}", text + plan)
    if found := check_artifact(build):
        raise Wrong("refused by check", "\n".join(map(str, found)) + plan)
    try:
        with load_local(build, devices={"cuda": "cpu"}):
            return ""
    except PartcError as error:
        raise Wrong("refused when loaded", f"{error}\n{plan}") from None


def reason(text: str) -> str:
    """A refusal without names, numbers and places."""
    line = text.splitlines()[0].split(": ", 1)[-1] if text else ""
    return re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\S*[\d@]\S*", "_", line)[:90]


if __name__ == "__main__":
    main(work, "legal plans", reason=reason)
