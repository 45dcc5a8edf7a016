"""Numbers as integers of eight bits in blocks, each with its scale; for sums of gradients and for rows of tokens.

    blocks [n, b] float32     codes [n, b] int8 = round(number / scale)     scales [n] float32 = the largest magnitude / 127

A number that comes back is off by at most half a scale: the block's largest magnitude / 254. A block with a number that is not finite comes
back as NaN. Blocks of b numbers take 1 + 4 / b bytes a number, in place of 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group
from partc.compiler.lower.comm import CommLowering, computed
from partc.runtime.artifact.format import FACTORS

_LARGEST, _LEAST = 127, float(np.finfo(np.float32).tiny)
"""The largest code, and the least scale, which divides a block of zeros."""


class EightBits:
    """Writes codes of numbers, and numbers of codes, on the ranks of a group; values are named after `base`."""

    def __init__(self, comm: CommLowering, group: Group, base: Value) -> None:
        self.comm, self.group, self.base = comm, group, base

    def encoded(self, blocks: Value, word: str) -> tuple[Value, Value]:
        """Writes the codes and the scales of blocks [n, b]."""
        last = self.constant("last", [1])
        magnitudes = self.op("Abs", [blocks], f"{word}.magnitudes")
        largest = self.op("ReduceMax", [magnitudes, last], f"{word}.largest", keepdims=0)
        steps = self.op("Div", [largest, self._number("steps", _LARGEST)], f"{word}.steps")
        steps = self.op("Max", [steps, self._number("least", _LEAST)], f"{word}.least_steps")
        # A maximum passes over NaN, and a code cannot be one: the scale is.
        differences = self.op("Sub", [blocks, blocks], f"{word}.zeros")
        zeros = self.op("ReduceSum", [differences, last], f"{word}.zero", keepdims=0)
        scales = self.op("Add", [steps, zeros], f"{word}.scales")
        kind = int(ir.DataType.INT8)
        return self.op("QuantizeLinear", [blocks, scales], f"{word}.codes", axis=0, output_dtype=kind), scales

    def decoded(self, codes: Value, scales: Value, word: str) -> Value:
        """Writes the blocks of codes [n, b] and scales [n]."""
        return self.op("DequantizeLinear", [codes, scales], word, axis=0)

    def constant(self, word: str, numbers: Sequence[int]) -> Value:
        """Returns a constant of integers."""
        return self.comm.constant(self.group, self.base, word, [*numbers])

    def _number(self, word: str, number: float) -> Value:
        made = self.comm.job.derived_on(self.group, self.base, f".{word}")
        return self.comm.job.constant(self.group, made, np.array(number, np.float32))

    def reshaped(self, value: Value, shape: Sequence[int], word: str, factors: str = "") -> Value:
        """Writes a Reshape."""
        return self.op("Reshape", [value, self.constant("sizes", shape)], word, factors)

    def op(
        self, op_type: str, inputs: Sequence[Value], word: str, factors: str = "", **attributes: int | Sequence[int]
    ) -> Value:
        """Writes a node with one result, and returns the result."""
        made = self.comm.job.derived_on(self.group, self.base, f".{word}")
        self.write(op_type, inputs, [made], factors, **attributes)
        return made

    def write(
        self,
        op_type: str,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        factors: str = "",
        **attributes: int | Sequence[int],
    ) -> None:
        """Writes a node; `factors`: its rule, where ranks have other rows of its result."""
        step = computed(op_type, inputs, outputs, None, None, **attributes)
        if factors:
            step.node.metadata_props[FACTORS] = factors
        self.comm.append(self.group, step)
