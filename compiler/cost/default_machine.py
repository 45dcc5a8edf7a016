"""The machine that stands for one that is not known: a device for each rank, at 50 TFLOP/s, and links of 100 GB/s."""

from __future__ import annotations

from partc.compiler.cost.machine import Curve, Link, Machine, Processor
from partc.runtime.artifact.format import CPU

DEFAULT = "the default machine (a device for each rank at 50 TFLOP/s, links of 100 GB/s)"


def default_machine() -> Machine:
    """A product of a million operations takes 2 us there, a message of a KiB 5 us."""
    products = {
        "matmul": Curve(((1e6, 2e-6), (1e12, 20e-3))),
        "convolution": Curve(((1e6, 4e-6), (1e12, 30e-3))),
    }
    kernels = {"elementwise": Curve(((4096.0, 2e-6), (2.0**30, 1e-3)))}
    send, reduced = Curve(((1024.0, 5e-6), (2.0**30, 10e-3))), Curve(((1024.0, 10e-6), (2.0**30, 12e-3)))
    link = Link("default", 2, 1, 1.0, 2e-6, send, reduced)
    return Machine(DEFAULT, 0, {CPU: Processor(20e-6, 200e-6, products, kernels)}, [link])
