"""A machine with round speeds, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.compiler.cost.machine import Curve, Link, Machine, Processor


def curve(per_second: float, least: float = 0.0) -> Curve:
    """A curve of a speed, and of what the least amount takes."""
    return Curve(tuple((float(amount), max(least, amount / per_second)) for amount in (1, 1 << 10, 1 << 20, 1 << 30)))


def machine(cores: int = 0, overlap: float = 1.0) -> Machine:
    """1 GFLOP/s, 1 GB/s of memory and of links, 10 us a message, 20 us an AllReduce among 2; a session takes 5 us, a step 100."""
    products, kernels = {"matmul": curve(1e9), "convolution": curve(1e9)}, {"elementwise": curve(1e9)}
    link = Link("default", 2, 1, overlap, 0.0, curve(1e9, 10e-6), curve(1e9, 20e-6))
    return Machine("machine.yaml", cores, {"cpu": Processor(5e-6, 100e-6, products, kernels)}, [link])


def links(latency: float, speed: float, flops: float = 1e9) -> Machine:
    """The machine with other links, and another speed of products."""
    one = machine()
    link = replace(one.links[0], send=curve(speed, latency), all_reduce=curve(speed, 2 * latency))
    cpu = one.processors["cpu"]
    return replace(one, links=[link], processors={"cpu": replace(cpu, products={"matmul": curve(flops)})})


def shared(one: Machine, ranks: int = 2, times: float = 2.0) -> Machine:
    """The machine where each of so many ranks of a host takes what it takes, and one alone so many times less."""

    def faster(curves: Mapping[str, Curve]) -> dict[str, Curve]:
        return {name: Curve(tuple((at, own / times) for at, own in curve.points)) for name, curve in curves.items()}

    processors = {
        name: replace(own, alone=replace(own, products=faster(own.products), kernels=faster(own.kernels)), ranks=ranks)
        for name, own in one.processors.items()
    }
    return replace(one, processors=processors)
