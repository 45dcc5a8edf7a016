"""The duration of a node on a target: computed from its work with the measured curve of the resource that bounds such an op.

    view           what calling any node takes; a constant nothing, as sessions fold it
    product        the operations of each matrix, or what it moves if that takes longer; and behind it `pack`: its second operand laid
                   out as kernels read it, which sessions do once for a constant. Of a batch of matrices, `batch` for each of them
    vectors        a batch of products of a matrix and a vector: the bytes of the matrices, which are read once
    convolution    that, a matrix for each image and group, and behind it `unfold`: the places of its windows written out as columns
    lookup         twice what it makes, in rows of up to 256 bytes; the rest of longer rows is copied
    scatter        what it moves, element by element; of one that writes rows its data are copied, and the rows are a lookup
    sort           the first that it makes, such as the values of TopK, and what it reads
    others         what it moves

What a node moves are its operands and what it makes. Nothing is faster than an elementwise op that moves as much, nor is a copy. A function
over flat memory, as an optimizer's, and one of rows are the nodes of their body, of which each makes as much as its largest operand has.

A core computes the columns of a product in blocks of 16, so that 4 columns take as long as 16. A convolution is, for each record, a product
whose columns are the pixels of its image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx import FunctionProto
from partc.compiler.cost.machine import FALLBACK, MATMUL, Processor
from partc.compiler.cost.node import PRODUCT, VIEW, Known, multiply_adds
from partc.compiler.cost.sizes import Operand
from partc.compiler.ops.registry import Entry, entry_of
from partc.compiler.ops.work import Dims

CONVOLUTION, UNFOLD, PACK = "convolution", "unfold", "pack"
BATCH, VECTORS = "batch", "vectors"
LOOKUP, SCATTER, LAYOUT, SORT = "lookup", "scatter", "layout", "sort"
ROW = 256
"""Bytes of the rows by which lookups are measured."""
_PER_MULTIPLY_ADD = 2
_COLUMNS = 16
"""Columns that a product computes together."""


@dataclass(frozen=True)
class NodeCost:
    """The kernel of a node; its operations, two for each multiply-add, in so many matrices; the bytes that it moves.

    `padding`: the columns that are computed for each column that is wanted. `laid_out`: of a product the bytes that are laid out first.
    `copied`: of a lookup, a scatter and a sort the bytes that are moved side by side, beside the others.
    """

    kernel: str
    operations: float
    matrices: int
    moved: float
    padding: float = 1.0
    laid_out: float = 0.0
    copied: float = 0.0

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices, or convolves."""
        return self.kernel in (PRODUCT, CONVOLUTION, VECTORS)

    @property
    def is_batch(self) -> bool:
        """Whether it multiplies several matrices in one call."""
        return self.kernel in (PRODUCT, VECTORS) and self.matrices > 1

    def seconds(self, processor: Processor) -> float:
        """On a target, without what its session takes."""
        if self.kernel == VIEW:
            called = processor.kernels.get(VIEW)
            return called.least if called is not None and self.moved else 0.0
        copy = processor.kernel(FALLBACK)
        if not self.is_product or (self.kernel == VECTORS and VECTORS in processor.kernels):
            beside = copy(self.copied) if self.copied else 0.0
            return max(processor.kernel(self.kernel)(self.moved), copy(self.moved)) + beside
        curve = processor.products.get(self.kernel) or processor.products[MATMUL]
        batch = processor.products.get(BATCH) if self.is_batch else None
        if batch is not None:  # the node is called once for all
            computed = copy.least + self.matrices * batch(self.padding * self.operations / self.matrices)
            return max(computed, copy(self.moved))
        computed = self.matrices * curve(self.padding * self.operations / self.matrices)
        layout = processor.kernels.get(UNFOLD if self.kernel == CONVOLUTION else PACK)
        beside = layout(self.laid_out) if layout is not None and self.laid_out else 0.0
        return max(computed, copy(self.moved)) + beside


def cost_of(node: ir.Node, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]) -> NodeCost:
    """The operations and bytes of a node, from the sizes of its operands; None for an absent operand."""
    entry = entry_of(node)
    kernel = entry.work.kernel if entry is not None else FALLBACK
    read_bytes, made = (sum(one.bytes for one in some if one is not None) for some in (inputs, outputs))
    moved = 2 * made if kernel == LAYOUT else read_bytes + made if read_bytes or kernel != VIEW else 0.0
    sizes: list[list[Known]] = [[None if one is None else one.sizes for one in some] for some in (inputs, outputs)]
    operations = _PER_MULTIPLY_ADD * multiply_adds(node, *sizes)
    if kernel in (LOOKUP, SCATTER) and entry is not None:
        rows, copied = _indexed(entry, node, inputs, outputs)
        return NodeCost(
            kernel if rows is None else LOOKUP, operations, 1, moved if rows is None else rows, copied=copied
        )
    if kernel == SORT:
        first = outputs[0] if outputs else None
        return NodeCost(kernel, operations, 1, 0.0 if first is None else first.bytes, copied=read_bytes)
    by_factors = entry is not None and entry.work.multiply_adds is None
    of_input = entry is not None and entry.work.columns_of_input
    columns = sizes[0] if of_input else sizes[1]
    padding = _padding(kernel, columns) if kernel == CONVOLUTION or by_factors else 1.0
    if kernel == CONVOLUTION and len(inputs) > 1 and inputs[1] is not None:
        matrices, elements = _windows(node, sizes[0], sizes[1], columns)
        images = int((sizes[0][0] or (1,))[0])
        moved += (images - 1) * inputs[1].bytes  # the filters are read again for each image
        return NodeCost(kernel, operations, matrices, moved, padding, elements * inputs[1].item)
    second = inputs[1] if kernel == PRODUCT and by_factors and len(inputs) > 1 else None
    packed = 0.0 if second is None or second.constant else second.bytes
    matrices, dims = _matrices(kernel, *sizes), sizes[1][0] if sizes[1] else None
    if kernel == PRODUCT and by_factors and matrices > 1 and dims and 1 in dims[-2:]:
        kernel = VECTORS
    return NodeCost(kernel, operations, matrices, moved, padding, packed)


def _indexed(
    entry: Entry, node: ir.Node, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]
) -> tuple[float | None, float]:
    """The bytes that a node moves in rows, None where it writes elements one by one, and those that it copies side by side."""
    dims: list[Dims] = [() if one is None or one.sizes is None else one.sizes for one in inputs]
    item = inputs[0].item if inputs and inputs[0] is not None else 1.0
    row = (
        item * math.prod(map(int, entry.work.row(node, dims)))
        if entry.work.row is not None and dims and dims[0]
        else item
    )
    made = sum(one.bytes for one in outputs if one is not None)
    taken, copied = made, 0.0
    if entry.work.kernel == SCATTER:
        if row <= item:
            return None, 0.0
        taken, copied = max((one.bytes for one in inputs[1:] if one is not None), default=0.0), 2 * made
    in_rows = 2 * taken * min(1.0, ROW / row) if row else 0.0
    return in_rows, copied + 2 * taken - in_rows


def function_seconds(
    function: FunctionProto, operands: Sequence[Operand | None], processor: Processor, shard: int = 0
) -> float:
    """Seconds of a function's nodes; with a `shard` those of flat operands go through so many elements at a time, a session's run each."""
    counts = [math.prod(one.sizes) for one in operands if one is not None and one.sizes is not None]
    shards = max(1, -(-max(counts, default=0) // shard)) if shard else 1
    cut_operands: list[Operand | None] = []
    for one in operands:  # of flat operands one of so many shards
        elements = 1 if one is None else math.prod(one.sizes or ())
        cut_operands.append(
            one if one is None or 1 in (shards, elements) else Operand((-(-elements // shards),), one.item)
        )
    total = shards * processor.session if shard else 0.0
    if shards > 1:  # what no cache holds comes from memory once, and what is made goes there
        read = [one.bytes for one in cut_operands if one is not None]
        total += processor.kernel(FALLBACK)(shards * (sum(read) + len(function.output) * max(read)))
    return total + sum(shards * one.seconds(processor) for one in function_costs(function, cut_operands))


def function_costs(function: FunctionProto, operands: Sequence[Operand | None]) -> Iterator[NodeCost]:
    """What the nodes of a function cost: each makes as much as its largest operand has, but for those that make numbers of dims."""
    known = dict(zip(function.input, operands, strict=False))
    for node in function.node:
        inputs = [ir.Value(name=name) if name else None for name in node.input]
        shown = ir.Node(node.domain, node.op_type, inputs=inputs)
        given = [known.get(name) for name in node.input]
        made = max((one for one in given if one is not None), key=lambda one: one.bytes, default=Operand((0,), 1))
        if (entry := entry_of(shown)) is not None and not entry.notation.keeps_dims:
            made = Operand((0,), made.item)
        known.update(dict.fromkeys(node.output, made))
        yield cost_of(shown, given, [made])


def _windows(
    node: ir.Node, inputs: Sequence[Known], outputs: Sequence[Known], columns: Sequence[Known]
) -> tuple[int, int]:
    """How many products of matrices a convolution is, one for each image and group, and the elements of the columns of all of them.

    The columns are the pixels of the first of `columns`. A filter of one place, side by side, reads the image as it is.
    """
    image, filters, pixels = inputs[0], inputs[1], columns[0] if columns else None
    if not image or not filters or not pixels or not outputs:
        return 1, 0
    group = node.attributes.get_int("group", 1)
    strides = node.attributes.get_ints("strides", ())
    places = math.prod(map(int, pixels[2:]))
    is_flat = all(size == 1 for size in (*filters[2:], *strides))
    matrices = max(1, int(image[0]) * group)
    return matrices, 0 if is_flat else matrices * places * math.prod(map(int, filters[1:]))


def _matrices(kernel: str, inputs: Sequence[Known], outputs: Sequence[Known]) -> int:
    """The number of matrices that a product multiplies: one where the second operand is a matrix."""
    if kernel != PRODUCT or len(inputs) < 2 or not inputs[1] or len(inputs[1]) < 3 or not outputs or not outputs[0]:
        return 1
    return max(1, math.prod(map(int, outputs[0][:-2])))


def _padding(kernel: str, dims: Sequence[Known]) -> float:
    """The columns that are computed for each column of a product, or pixel of the first of some images; one column is not padded."""
    made = next(iter(dims), None)
    if made is None or kernel not in (PRODUCT, CONVOLUTION):
        return 1.0
    columns = math.prod(map(int, made[2:])) if kernel == CONVOLUTION else int(made[-1]) if len(made) > 1 else 1
    return -(-columns // _COLUMNS) * _COLUMNS / columns if columns > (kernel == PRODUCT) else 1.0
