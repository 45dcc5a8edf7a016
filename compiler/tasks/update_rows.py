"""The update of a table by the rows of its gradient: rows that stand several times are merged, where the update wants each once.

%t.grad.merged.ids, %t.grad.merged.rows = partc.optimizer::MergeRows(%t.grad.ids, %t.grad.rows)
%t.next = partc.optimizer::SgdRowsScaled(%t, %t.grad.merged.ids, %t.grad.merged.rows, %lr, %gradients.scale)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.training import ParameterOptions, Training
from partc.compiler.lower.job import Job
from partc.compiler.lower.local_view import Gradient
from partc.compiler.training.optimizers import merge_node, row_update_node, takes_rows_again

Append = Callable[[Group, Sequence[ir.Node], dict[str, Value]], None]
_IDS = ir.TensorType(ir.DataType.INT64)


@dataclass(frozen=True)
class RowUpdates:
    """Writes the updates by rows; `append` writes nodes on the ranks of a group, over values by handle."""

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
        made = [self.job.value(group, f"{base}.merged.{word}") for word in ("ids", "rows")]
        ids, rows = ir.Value(name=str(made[0]), type=_IDS), ir.Value(name=str(made[1]), type=one.parameter.type)
        values = {str(value): value for value in (one.ids, one.value, *made)}
        self.append(
            group, [merge_node(ir.Value(name=str(one.ids)), ir.Value(name=str(one.value)), [ids, rows])], values
        )
        return replace(one, value=made[1], ids=made[0], distinct=True)

    def update(
        self,
        one: Gradient,
        table: ir.Value,
        slots: Sequence[ir.Value],
        scalars: dict[str, ir.Value],
        made: Sequence[ir.Value],
        values: dict[str, Value],
    ) -> None:
        """Writes the update of a table and its slots, over values by handle."""
        learned: ParameterOptions = self.training.parameters[one.parameter]

        node = row_update_node(
            self.training.optimizer_of(one.parameter),
            table,
            ir.Value(name=str(one.ids)),
            ir.Value(name=str(one.value), type=table.type),
            slots,
            scalars,
            made,
            weight_decay=learned.weight_decay,
            lr_multiplier=self.training.lr_multiplier(one.parameter),
            clip_value=self.training.rules.clipping.value or 0.0,
        )
        self.append(one.home.group, [node], values)
