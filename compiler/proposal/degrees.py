"""The degrees of a proposal: the numbers of ranks that share a layer, the batch and the stages, which are the axes of its mesh.

Experts are sharded over some or all of the ranks that share the batch: `dp 8, ep 4` is the mesh {dp: 2, ep: 4}, whose axes both shard the
batch, and `dp 4, ep 4` is {dp: 4}.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """The numbers of ranks that share a layer, of shards of the batch, of stages, of ranks among those of `dp` that share experts, and of
    shards of a sequence.
    """

    tp: int = 1
    dp: int = 1
    stages: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.stages * self.cp

    @property
    def shards(self) -> int:
        """The number of shards of all records' tokens."""
        return self.dp * self.cp

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of more than one rank."""
        apart = self.ep if self.ep < self.dp else 1
        axes = {"pp": self.stages, "dp": self.dp // apart, "ep": apart, "cp": self.cp, "tp": self.tp}
        return {name: size for name, size in axes.items() if size > 1} if self.tp * self.dp * self.cp > 1 else {}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that shard the batch."""
        return tuple(axis for axis in ("dp", "ep") if axis in self.mesh)

    @property
    def expert_axis(self) -> str:
        """The axis of the mesh that shards experts; empty if none does."""
        return self.batch_axes[-1] if self.ep > 1 else ""

    @property
    def mesh_line(self) -> str:
        """`mesh: {dp: 2, tp: 4}`, or nothing."""
        return f"mesh: {{{', '.join(f'{axis}: {size}' for axis, size in self.mesh.items())}}}" if self.mesh else ""

    @property
    def frame(self) -> str:
        """A plan that has the ranks and places nothing on them."""
        return f"ranks: {self.ranks}\n{self.mesh_line}\n"
