"""Reads tensors of GPTQ, AWQ, fp8 and MXFP4 as weights of the float model; `quantization_config` in config.json names the method.

    GPTQ  qweight [K * bits / 32, N] int32, the first row of a word in its lowest bits; qzeros [K / group, N * bits / 32]; g_idx [K]
    AWQ   qweight [K, N * bits / 32] int32, the even columns of a word, then the odd ones; qzeros [K / group, N * bits / 32]
    both  scales [K / group, N]
    fp8   weight [N, K]; weight_scale_inv [N / rows of a block, K / columns of a block], or weight_scale [N, 1], [1]
    mxfp4 experts' blocks [E, N, K / 32, 16] uint8, two numbers of 1, 2 and 1 bits (sign, exponent, fraction) each, the first in the low
          half; scales [E, N, K / 32] uint8, exponents of 2 plus 127; the weight is [E, K, N]

Zero points of GPTQ's first form are stored minus 1. Products of GPTQ and AWQ become `MatMulNBits` of the same numbers (`ir/blocked.py`);
weights in fp8 and MXFP4 are read as floats, and activations are not rounded. Sources: the packings of AutoGPTQ and GPTQModel
(`checkpoint_format` gptq and gptq_v2), that of AutoAWQ (`version` gemm), the fine-grained fp8 and the MXFP4 of transformers, fp8 of FBGEMM
and of compressed-tensors (`format` float-quantized), and the OCP's specification of microscaling formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.safetensors_files import CONFIG, InFile, InFiles
from partc.compiler.frontend.huggingface.weights import stored_as
from partc.compiler.ir.blocked import BlockedWeight, Blocks
from partc.compiler.ir.computed import Box, ComputedTensor, shard_of
from partc.compiler.ir.value_info import Array
from partc.compiler.plan.precision import BLOCKS
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.safetensors_stream import Stored
from partc.runtime.errors import PartcError
from partc.runtime.units import first_of

_WORD = 32
_HELP = "use the folder of float weights, with `quantize` in the plan"
_FORMS = {"gptq": ("checkpoint_format", ("gptq", "gptq_v2")), "awq": ("version", ("gemm",))}
"""Maps each method to the key of its packing, and the packings that are read, the usual one first."""
_SCALES_OF_FP8 = {"fp8": "_scale_inv", "fbgemm_fp8": "_scale", "compressed-tensors": "_scale"}
"""Maps each method to the suffix of the name of an fp8 weight's scales."""
_OF_FP4 = np.array([sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_MX_BLOCK, _MX_BIAS = 32, 127


def float_weights(config: Mapping[str, object], files: Mapping[str, InFile], folder: str) -> Mapping[str, InFile]:
    """Returns a folder's tensors by name, each quantized weight as one tensor. Raises CompileError with all weights that cannot be read."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return files
    where, method = f"{folder}/{CONFIG}", str(settings.get("quant_method", "")).lower()
    if method == "mxfp4":
        return _of_mxfp4(files, folder)
    if method == "compressed-tensors" and settings.get("format") != "float-quantized":
        fact = f"the weights are in the form '{settings.get('format')}' of {method}"
        raise CompileError(Problem(where, fact, "float-quantized is read", _HELP))
    if method in _SCALES_OF_FP8:
        return _of_fp8(settings.get("weight_block_size"), _SCALES_OF_FP8[method], files, folder)
    if method not in _FORMS:
        fact = f"the weights are quantized ({method or 'by an unknown method'})"
        law = f"{', '.join([*_FORMS, *_SCALES_OF_FP8])} and mxfp4 are read"
        raise CompileError(Problem(where, fact, law, _HELP))
    key, forms = _FORMS[method]
    form = str(settings.get(key) or settings.get("format") or forms[0]).lower()
    if form not in forms:
        fact = f"the weights are in the form '{form}' of {method}"
        raise CompileError(Problem(where, fact, f"{' and '.join(forms)} are read", _HELP))
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if bits not in (4, 8) or not isinstance(group, int):
        fact = f"the weights have {bits} bits in groups of {group}"
        raise CompileError(Problem(where, fact, "4 and 8 bits are read", _HELP))
    is_symmetric = settings.get("sym" if method == "gptq" else "zero_point") is (method == "gptq")
    packing = _Packing(bits, group, method == "gptq", form == "gptq", is_symmetric)
    weights, problems = dict(files), list[Problem]()
    for name in [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]:
        words = weights.pop(f"{name}.qweight")
        result = packing.weight(
            name, words, *(weights.pop(f"{name}.{kind}", None) for kind in ("qzeros", "scales", "g_idx"))
        )
        if isinstance(result, str):
            problems.append(Problem(folder, f"'{name}' {result}", help=_HELP))
        else:
            weights[f"{name}.weight"] = InFiles(words.file, Stored(BY_NAME["float"], result.shape), result.tensor)
    if problems:
        raise CompileError(problems)
    return weights


@dataclass(frozen=True)
class _Packing:
    """How quantized numbers are packed into 32-bit words.

    `by_rows`: a word holds numbers of consecutive rows, else of columns. `less`: zero points are stored minus 1.
    """

    bits: int
    group: int
    by_rows: bool
    less: bool
    symmetric: bool

    @property
    def per_word(self) -> int:
        return _WORD // self.bits

    def weight(
        self, name: str, words: InFile, zeros: InFile | None, scales: InFile | None, groups: InFile | None
    ) -> BlockedWeight | str:
        """Returns the weight of a module, or the text of its problem where it cannot be read."""
        if zeros is None or scales is None:
            return "has qweight without qzeros and scales"
        types = {one.stored.dtype.name for one in (words, zeros)}
        if types != {"int32"} or any(len(one.stored.shape) != 2 for one in (words, zeros, scales)):
            return f"has words of {first_of(sorted(types))}; qweight, qzeros and scales of two dims are read, in words of int32"
        first, second = words.stored.shape
        size, columns = (first * self.per_word, second) if self.by_rows else (first, second * self.per_word)
        count = scales.stored.shape[0]
        if scales.stored.shape != (count, columns) or zeros.stored.shape != (count, -(-columns // self.per_word)):
            shapes = f"qweight {[first, second]}, qzeros {[*zeros.stored.shape]} and scales {[*scales.stored.shape]}"
            return f"has {shapes}, which do not fit {self.bits} bits"
        group = size // count if count else 0
        if (
            not group
            or group * count != size
            or (groups is None and group != (size if self.group == -1 else self.group))
        ):
            return f"has {size} rows in {count} groups of {self.group}: the last one is shorter"
        block = next((block for block in reversed(BLOCKS) if group % block == 0), 0)
        if not block:
            return f"has groups of {group} rows, which no block of {first_of([*map(str, BLOCKS)], 5)} divides"
        order = None
        if groups is not None:
            of_row = _mapped(groups, name).numpy().astype(np.int64)
            order = np.argsort(of_row, kind="stable")
            if of_row.shape != (size,) or (of_row[order] != np.arange(size) // group).any():
                return f"has a g_idx whose groups are not {count} of {group} rows each, and blocks have the same number of rows"
            order = None if (order == np.arange(size)).all() else order
        tensors = (
            _mapped(file, f"{name}.{kind}")
            for file, kind in ((words, "qweight"), (zeros, "qzeros"), (scales, "scales"))
        )
        parts = _Parts(self, name, size, group, block, order, *tensors)
        return BlockedWeight(name, (columns, size), self.bits, block, self.symmetric, order, parts.read)

    def numbers(self, words: Array) -> Array:
        """Unpacks words into their numbers, along the last dim."""
        shifts = np.arange(0, _WORD, self.bits, dtype=np.uint32)
        numbers = ((words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        if not self.by_rows:  # the first half of a word has the even columns, the other the odd ones
            numbers = numbers.reshape(*words.shape, 2, -1).swapaxes(-1, -2)
        return numbers.reshape(*words.shape[:-1], -1)

    def columns(self, words: ir.TensorProtocol, rows: slice, columns: slice, less: bool = False) -> Array:
        """Unpacks a box of a tensor whose words pack columns: [rows, columns]; `less`: the numbers are stored minus 1."""
        first = columns.start // self.per_word
        chosen = np.ascontiguousarray(shard_of(words, (rows, slice(first, -(-columns.stop // self.per_word)))))
        numbers = self.numbers(chosen)
        if less:
            ones = np.uint32(sum(1 << shift for shift in range(0, _WORD, self.bits)))
            numbers = (numbers + 1) & ((1 << self.bits) - 1)
            if (self.numbers(chosen.view(np.uint32) + ones) != numbers).any():
                fact = f"'{words.name}' has zero points of 0, which are stored minus 1: some packers take that from the next number"
                raise PartcError(f"{fact}\n  help: save the folder with checkpoint_format gptq_v2, or {_HELP}")
        begin = columns.start - first * self.per_word
        return numbers[:, begin : begin + columns.stop - columns.start]


@dataclass(frozen=True)
class _Parts:
    """The tensors of one quantized weight; `order` permutes its rows."""

    packing: _Packing
    name: str
    size: int
    group: int
    block: int
    order: Array | None
    words: ir.TensorProtocol
    zeros: ir.TensorProtocol
    scales: ir.TensorProtocol

    def read(self, columns: slice, blocks: slice) -> Blocks:
        """Returns the blocks of a range of columns and of blocks."""
        packing, rows = self.packing, slice(blocks.start * self.block, blocks.stop * self.block)
        source = rows if self.order is None else slice(0, self.size)
        if packing.by_rows:
            first = source.start // packing.per_word
            words = shard_of(self.words, (slice(first, -(-source.stop // packing.per_word)), columns))
            begin = source.start - first * packing.per_word
            numbers = packing.numbers(np.ascontiguousarray(words.T))[:, begin : begin + source.stop - source.start]
        else:
            numbers = packing.columns(self.words, source, columns).T
        if self.order is not None:
            numbers = numbers[:, self.order[rows]]
        groups = slice(rows.start // self.group, -(-rows.stop // self.group))
        of_block = np.arange(rows.start, rows.stop, self.block) // self.group - groups.start
        points = packing.columns(self.zeros, groups, columns, packing.less).T[:, of_block]
        middle = 1 << (packing.bits - 1)
        if packing.symmetric and (points != middle).any():
            fact = f"'{self.name}' has zero points other than {middle}, and config.json says that it has none"
            raise PartcError(f"{fact}\n  help: {_HELP}")
        numbers = np.ascontiguousarray(numbers).reshape(numbers.shape[0], -1, self.block)
        return Blocks(numbers, points, shard_of(self.scales, (groups, columns)).T[:, of_block])


def _mapped(file: InFile, name: str) -> ir.TensorProtocol:
    """Returns a tensor of a file in its stored type."""
    return stored_as(file, ir.DataType(file.stored.dtype.code), name)


def _of_fp8(size: object, suffix: str, files: Mapping[str, InFile], folder: str) -> Mapping[str, InFile]:
    """Returns the tensors, with each fp8 weight multiplied by its scales.

    A scale applies to a block of `size`; without `size`, to a row or the whole tensor.
    """
    weights, problems = dict(files), list[Problem]()
    for name, file in files.items():
        if not file.stored.dtype.name.startswith("float8"):
            continue
        scale, shape = weights.pop(f"{name}{suffix}", None), file.stored.shape
        weights.pop(f"{name.removesuffix('weight')}input_scale", None)  # scales of activations, which stay floats
        rows = [[*shape[:1]], [*shape[:1], 1]]
        of_rows = scale is not None and not size and [*scale.stored.shape] in rows
        block = size if isinstance(size, list) and len(size) == 2 else [1, *shape[1:]] if of_rows else [*shape]
        count = [-(-dim // max(1, per)) for dim, per in zip(shape, block, strict=False)]
        legal = [count] if size else [[], [1], [1, 1], *rows]
        if scale is None or len(shape) != 2 or [*scale.stored.shape] not in legal:
            fact = f"'{name}' {[*shape]} has no {suffix[1:]} of {count}"
            problems.append(Problem(folder, fact, help=_HELP))
        else:
            weights[name] = InFiles(file.file, Stored(BY_NAME["float"], shape), _scaled(file, scale, block))
    if problems:
        raise CompileError(problems)
    return weights


def _of_mxfp4(files: Mapping[str, InFile], folder: str) -> Mapping[str, InFile]:
    """Returns the tensors, with experts in MXFP4 as floats."""
    weights, problems = dict(files), list[Problem]()
    for name in [name.removesuffix("_blocks") for name in files if name.endswith("_blocks")]:
        blocks, scales = weights.pop(f"{name}_blocks"), weights.pop(f"{name}_scales", None)
        shape, kinds = blocks.stored.shape, {one.stored.dtype.name for one in (blocks, scales) if one is not None}
        if scales is None or len(shape) != 4 or shape[3] * 2 != _MX_BLOCK or kinds != {"uint8"}:
            fact = f"'{name}' has blocks {[*shape]}, and not [experts, rows, blocks, {_MX_BLOCK // 2}] in uint8 with scales"
            problems.append(Problem(folder, fact, help=_HELP))
        elif scales.stored.shape != shape[:3]:
            fact = f"'{name}' has blocks {[*shape]} and scales {[*scales.stored.shape]}"
            problems.append(Problem(folder, fact, help=_HELP))
        else:
            whole = (shape[0], shape[2] * _MX_BLOCK, shape[1])
            weights[name] = InFiles(blocks.file, Stored(BY_NAME["float"], whole), _of_fp4(blocks, scales, whole))
    if problems:
        raise CompileError(problems)
    return weights


def _of_fp4(
    blocks: InFile, scales: InFile, shape: tuple[int, int, int]
) -> Callable[[ir.DataType, str], ir.TensorProtocol]:
    """Returns a function that makes experts' weights [E, K, N] from blocks of 4-bit numbers and their exponents."""
    packed, exponents = _mapped(blocks, ""), _mapped(scales, "")

    def expert(number: int, rows: slice, columns: slice) -> Array:
        first, last = rows.start // _MX_BLOCK, -(-rows.stop // _MX_BLOCK)
        part = (slice(number, number + 1), columns, slice(first, last))
        bytes_ = shard_of(packed, (*part, slice(0, _MX_BLOCK // 2)))[0]
        numbers = _OF_FP4[np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)].reshape(*bytes_.shape[:2], -1)
        powers = shard_of(exponents, part)[0].astype(np.int32) - _MX_BIAS
        begin = rows.start - first * _MX_BLOCK
        weight: Array = np.ldexp(numbers, powers[..., None]).reshape(len(bytes_), -1)
        return weight[:, begin : begin + rows.stop - rows.start].T

    def compute(box: Box, dtype: ir.DataType) -> Array:
        experts, rows, columns = box
        return np.stack([expert(k, rows, columns).astype(dtype.numpy()) for k in range(experts.start, experts.stop)])

    return lambda dtype, name: ComputedTensor(lambda box: compute(box, dtype), dtype, shape, name)


def _scaled(file: InFile, scale: InFile, block: Sequence[int]) -> Callable[[ir.DataType, str], ir.TensorProtocol]:
    """Returns a function that makes an fp8 weight multiplied by the scales of its blocks."""
    numbers, scales = _mapped(file, ""), _mapped(scale, "")

    def compute(box: Box) -> Array:
        of_block = [np.arange(part.start, part.stop) // size for part, size in zip(box, block, strict=True)]
        factors = scales.numpy().astype(np.float32).reshape(-(-file.stored.shape[0] // block[0]), -1)
        product: Array = shard_of(numbers, box).astype(np.float32) * factors[np.ix_(*of_block)]
        return product

    return lambda dtype, name: ComputedTensor(
        lambda box: compute(box).astype(dtype.numpy()), dtype, file.stored.shape, name
    )
