"""One spec of the standard held against the tensor that it speaks of: the spread that it describes, or all that is wrong.

The laws: an axis is one of the tensor's and stands once; a cut makes equal shards of the size that the tensor has; there are
as many devices, or groups of devices, as shards, each device once and all groups of one size; a tensor that is not cut
is on every device named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import onnx_ir as ir
from partc.compiler.annotations.spread import Spread, fused_shards
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Shape

_EQUAL = "the shards of a tensor are equal"


def spread_in(
    spec: ir.ShardingSpec, rank: int | None, shape: Shape | None, devices: int
) -> tuple[Spread | None, list[tuple[str, str]]]:
    """The spread, and pairs of a fact and its law for what is wrong; `rank` and `shape` None where unknown.

    A tensor of unknown rank has a spread only where no axis is cut.
    """
    holders, device_faults = _devices(tuple(spec.device), tuple(spec.index_to_device_group_map), devices)
    wrong = [*_axis_faults(spec, rank), *device_faults]
    cuts: dict[int, int] = {}
    for sharded in spec.sharded_dims:
        axis = sharded.axis + rank if rank is not None and sharded.axis < 0 else sharded.axis
        if rank is None or not 0 <= axis < rank:
            continue
        size = shape[axis] if shape is not None else None
        wrong += _size_faults(sharded, axis, size)
        count = fused_shards([(_size(one.dim), max(one.num_shards, 1)) for one in sharded.simple_shardings])
        if count is None:
            wrong.append(
                (f"axis {axis} is fused of parts whose shards are not runs of it", "a rank holds one run of a dim")
            )
        cuts[axis] = count or 1
    product = math.prod(cuts.values())
    if not wrong and rank is None and spec.sharded_dims:
        wrong.append(
            ("its number of dims is not known, but it is sharded", "a sharded tensor has a known number of dims")
        )
    if not wrong and holders and product == 1:
        holders = (tuple(sorted(device for ranks in holders for device in ranks)),)
    if not wrong and holders and len(holders) != product:
        shown = " x ".join(f"axis {axis} in {count}" for axis, count in sorted(cuts.items())) or "no axis is sharded"
        fact = f"{product} shards ({shown}), but {len(holders)} devices or groups of devices"
        wrong.append((fact, "there is one for each shard, row-major over the axes"))
    if not wrong and len({len(ranks) for ranks in holders}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in holders)
        wrong.append(
            (f"its shards are on groups of unequal sizes: {sizes}", "every shard is on the same number of devices")
        )
    if wrong:
        return None, wrong
    return Spread(tuple(cuts.get(axis, 1) for axis in range(rank or 0)), holders), []


def _axis_faults(spec: ir.ShardingSpec, rank: int | None) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    for sharded in spec.sharded_dims:
        axis = sharded.axis
        if rank is not None and not -rank <= axis < rank:
            yield (
                f"axis {axis} is sharded, but it has {rank} dims",
                f"an axis is in -{rank} .. {rank - 1}" if rank else "a scalar has no axis",
            )
            continue
        axis = axis + rank if rank is not None and axis < 0 else axis
        if axis in seen:
            yield f"axis {axis} is sharded twice", "an axis appears once"
        seen.add(axis)
        for one in sharded.simple_shardings:
            if one.num_shards < 1:
                yield f"axis {axis} is sharded into {one.num_shards}", "a dim is sharded into 1 shard or more"


def _size_faults(sharded: ir.ShardedDim, axis: int, size: int | str | None) -> Iterator[tuple[str, str]]:
    """Facts and laws of stated sizes that differ from the tensor's, and of sizes that do not divide evenly."""
    parts = sharded.simple_shardings
    stated = [_size(one.dim) for one in parts]
    known = math.prod(each for each in stated if each is not None)
    if isinstance(size, int) and parts and (known != size if None not in stated else known and size % known):
        yield (
            f"axis {axis} is {'x'.join(str(each) for each in stated)} in the annotation, but {size} in the model",
            "both are the size of one dim",
        )
        return
    for one, part in zip(parts, stated, strict=True):
        whole = part if part is not None else size if len(parts) == 1 else None
        if isinstance(whole, int) and one.num_shards > 1 and whole % one.num_shards:
            yield f"axis {axis} of {whole} is sharded into {one.num_shards} unequal shards", _EQUAL


@lru_cache(maxsize=4096)
def _devices(
    device: Group, entries: tuple[ir.IndexToDeviceGroupMapEntry, ...], devices: int
) -> tuple[tuple[Group, ...], tuple[tuple[str, str], ...]]:
    """Maps each shard to the devices that hold it; with facts and laws of what is wrong."""
    groups = {entry.key: tuple(entry.value) for entry in entries}
    holders = tuple(groups.get(each, (each,)) for each in device)
    wrong = []
    if len(groups) < len(entries):
        wrong.append(("index_to_device_group_map has a key twice", "a key names one group"))
    for each, members in zip(device, holders, strict=True):
        if not members:
            wrong.append((f"the group {each} is empty", "a shard is on at least one device"))
        within = f" of group {each}" if each in groups else ""
        for member in members:
            if not 0 <= member < devices:
                law = f"devices are 0 .. {devices - 1}, other numbers are keys of index_to_device_group_map"
                wrong.append((f"device {member}{within} is not there, the configuration has {devices}", law))
    counts = Counter(member for members in holders for member in members)
    if twice := sorted(member for member, count in counts.items() if count > 1):
        wrong.append((f"device {twice[0]} holds two shards", "a device holds one shard of a tensor"))
    return holders, tuple(wrong)


def _size(dim: int | ir.SymbolicDim) -> int | None:
    return dim if isinstance(dim, int) else None
