"""Artifacts whose nodes are given targets after they were compiled: any node anywhere, with the copies that it then needs.

    folder = targeted(build, out, lambda node: "cuda" if "fc1" in path_of(node) else "cpu")
    with load_local(folder, trust=True, devices={"cuda": "cpu"}) as ranks: ...

Tasks stand there as their nodes. What the compiler makes of `target:` has fewer copies, and the same meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, helper
from partc.cli.comparison.variant import variant
from partc.runtime.artifact.format import CAUSE, COPY, CPU, DOMAIN, DOMAIN_VERSION, PATH, TARGET, Manifest
from partc.runtime.artifact.graph.onnx_graph import path_of, reads
from partc.runtime.artifact.graph.rank_constants import is_rank_constant
from partc.runtime.artifact.tasks.calls import rename_values
from partc.runtime.execution.in_process import LocalProgram
from training_equivalence import fed, tensors

Choose = Callable[[NodeProto], str]
_SIZES = ("Shape", "Size")
ON_CPU = {"cuda": "cpu"}


def scattered(node: NodeProto) -> str:
    """A target by the name of what a node makes: neighbours often differ."""
    return "cuda" if hashlib.sha256(node.output[0].encode()).digest()[0] % 2 else "cpu"


def perceptron_steps(ranks: LocalProgram, count: int = 3) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """What some steps of the perceptron give, and the state after them."""
    random = np.random.default_rng(5)
    losses = []
    for step in range(count):
        x, t = (random.normal(size=(8, size)).astype(np.float32) for size in (6, 3))
        losses.append(np.asarray(ranks({**fed(ranks, step), "x": x, "t": t})["loss"]).tobytes())
    return losses, tensors(ranks)


def targeted(folder: Path, out: Path, choose: Choose) -> Path:
    """The artifact with every node that computes on the target that `choose` says."""

    def change(rank: int, model: ModelProto, manifest: Manifest) -> Manifest:
        kept = {record.value: record.next for record in manifest.state}
        give_targets(model, choose, kept)
        return manifest

    return variant(folder, out, change)


def give_targets(model: ModelProto, choose: Choose, kept: Mapping[str, str]) -> None:
    """Targets and copies in one rank file; `kept` gives by tensor of the state its next value."""
    graph = model.graph
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    makers = {name: node for node in nodes for name in node.output}
    constants = {tensor.name for tensor in graph.initializer} - {port.name for port in graph.input}
    constants |= {name for node in nodes if is_rank_constant(node) for name in node.output}
    where = {name: choose(makers[made]) for name, made in kept.items() if made in makers}
    made_on: dict[tuple[str, str], str] = {}
    outputs = {port.name for port in graph.output} - {*kept.values()}
    del graph.node[:]
    for node in nodes:
        if is_rank_constant(node):
            graph.node.append(node)
            continue
        target = CPU if node.domain == DOMAIN else choose(node)
        instead = {}
        for name in dict.fromkeys(reads(node)):
            if name not in constants and where.get(name, CPU) != target:
                if (name, target) not in made_on:
                    made_on[name, target] = f"{name}.{target}"
                    graph.node.append(_copy(name, f"{name}.{target}", target, path_of(node)))
                instead[name] = made_on[name, target]
        if node.domain != DOMAIN:
            node.metadata_props.add(key=TARGET, value=target)
        for name in node.output:
            where[name] = CPU if node.op_type in _SIZES else target
        given = [name for name in node.output if name in outputs and where[name] != CPU]
        instead |= {name: f"{name}.{target}" for name in given}
        rename_values(node, instead)
        where |= {f"{name}.{target}": target for name in given}
        graph.node.append(node)
        for name in given:
            where[name] = CPU
            graph.node.append(_copy(f"{name}.{target}", name, CPU, path_of(node)))
    if DOMAIN not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))


def _copy(source: str, result: str, to: str, path: str) -> NodeProto:
    node = helper.make_node(COPY, [source], [result], name=f"{result}.copy", domain=DOMAIN, to=to)
    node.metadata_props.add(key=PATH, value=path)
    node.metadata_props.add(key=CAUSE, value="test")
    return node
