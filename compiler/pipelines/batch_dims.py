"""The dims of the programs of one microbatch as those of the whole batch: `batch` of a microbatch is `batch/2`."""

from __future__ import annotations

from collections.abc import Mapping

from partc.compiler.analysis.part_symbols import of_batch
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read, symbol
from partc.compiler.ir.value_info import Shape, SymbolInfo


class BatchDims:
    """Dims of a microbatch in terms of the whole batch, which has `count` of them; `symbols` are those of the whole batch."""

    def __init__(self, symbols: Mapping[str, SymbolInfo], count: int) -> None:
        whole = {name: of_batch(info, count) for name, info in symbols.items() if info.parts > 1}
        self.symbols = {**symbols, **whole}
        self.known = {name: info.facts for name, info in self.symbols.items()}
        self.shares = {symbol(name): symbol(name) / count for name in whole}
        self.made: dict[tuple[str, int], int | str] = {}

    def shape(self, shape: Shape | None) -> Shape | None:
        """The shape of a value of a microbatch, in the dims of the whole batch."""
        return None if shape is None else tuple(dim if isinstance(dim, int) else self.dim(dim) for dim in shape)

    def text(self, expression: str) -> str:
        """An expression of a microbatch, such as bytes, in the dims of the whole batch."""
        return str(self.dim(expression))

    def dim(self, text: str, times: int = 1) -> int | str:
        """So many times a dim of a microbatch, in the dims of the whole batch."""
        if (text, times) not in self.made:  # every row and body asks for the dims of all its values
            self.made[text, times] = self._dim(text, times)
        return self.made[text, times]

    def _dim(self, text: str, times: int) -> int | str:
        expression = read(text)
        if expression is None or (not self.shares and times == 1):
            return text
        found = normal(times * expression.subs(self.shares, simultaneous=True), self.known)
        return int(found) if found.is_Integer else str(found)
