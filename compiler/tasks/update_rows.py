"""The update of a table by the rows of its gradient: rows that stand several times are merged, where the update wants each once.

%t.grad.merged.ids, %t.grad.merged.rows = partc.optimizer::MergeRows(%t.grad.ids, %t.grad.rows)
%t.next = partc.optimizer::SgdRowsScaled(%t, %t.grad.merged.ids, %t.grad.merged.rows, %lr, %gradients.scale)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.stand_ins import StandIns
from partc.compiler.ir.training import ParameterOptions, Training
from partc.compiler.lower.job import Job
from partc.compiler.lower.local_view import Gradient
from partc.compiler.training.optimizers import merge_node, row_update_node, takes_rows_again

Append = Callable[[Group, Sequence[ir.Node], StandIns], None]
_IDS = ir.TensorType(ir.DataType.INT64)


@dataclass(frozen=True)
class RowUpdates:
    """Writes the updates by rows; `append` writes nodes on the ranks of a group, over values."""

    training: Training
    job: Job
    append: Append

    def wants_each_once(self, one: Gradient, clipped: bool) -> bool:
        """Whether a gradient is by rows of which each must stand once: where it is `clipped` by its norm, or its update is not linear."""
        form = self.training.optimizer_of(one.parameter).form
        return one.ids is not None and (
            clipped or not takes_rows_again(form.function, bool(self.training.rules.clipping.value))
        )

    def merged(self, one: Gradient) -> Gradient:
        """The gradient with each id once."""
        assert one.ids is not None
        base, group = str(one.value).removesuffix(".rows"), one.home.group
        ids, rows = (self.job.value(group, f"{base}.merged.{word}") for word in ("ids", "rows"))
        values = StandIns()
        made = [values.of(ids, _IDS), values.of(rows, one.parameter.type)]
        self.append(group, [merge_node(values.of(one.ids), values.of(one.value), made)], values)
        return replace(one, value=rows, ids=ids, distinct=True)

    def update(
        self,
        one: Gradient,
        table: ir.Value,
        slots: Sequence[ir.Value],
        scalars: dict[str, ir.Value],
        made: Sequence[ir.Value],
        values: StandIns,
    ) -> None:
        """Writes the update of a table and its slots, over values."""
        assert one.ids is not None
        learned: ParameterOptions = self.training.parameters[one.parameter]
        node = row_update_node(
            self.training.optimizer_of(one.parameter),
            table,
            values.of(one.ids),
            values.of(one.value, table.type),
            slots,
            scalars,
            made,
            weight_decay=learned.weight_decay,
            lr_multiplier=self.training.lr_multiplier(one.parameter),
            clip_value=self.training.rules.clipping.value or 0.0,
        )
        self.append(one.home.group, [node], values)
