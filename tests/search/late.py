"""Machines on which latencies weigh more than speeds, and searches of perceptrons that are trained there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from machines import curve, machine
from partc.compiler.cost.machine import Curve, Machine
from partc.compiler.search.base_plan import base_of
from partc.compiler.search.candidate import Fixed
from partc.compiler.search.search import Request, Search
from perceptrons import TRAIN, layers
from proposal_case import source


def late(session: float, called: float) -> Machine:
    """A machine on which sessions, nodes and messages take long, whatever they compute and send."""
    one = machine()
    link = replace(one.links[0], overlap=1.0, send=curve(1e11, called), all_reduce=curve(1e11, called))
    kernels = {"elementwise": Curve(((4096.0, called), (float(1 << 30), 1e-3)))}
    products = {"matmul": Curve(((1e6, called), (1e12, 2e-2)))}
    cpu = replace(one.processors["cpu"], session=session, products=products, kernels=kernels)
    return replace(one, cores=0, links=[link], processors={"cpu": cpu})


def trained(folder: Path, ranks: int, on: Machine, depth: int, more: str = "") -> Search:
    """A search of how the layers are trained."""
    (folder / "train.yaml").write_text(TRAIN + more)
    base, model = base_of(folder / "train.yaml", source(layers(depth=depth)))
    return Search.of(model, "model.onnx", Request(ranks, Fixed(), base, on, {}))
