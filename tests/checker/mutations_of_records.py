"""Mutations of what an artifact declares: types and shapes, programs, shards, the places of weights."""

from __future__ import annotations

from mutations_of_calls import Draft, Mutation
from onnx import TensorProto


def types(draft: Draft) -> bool:
    """A value is declared of another type."""
    ports = list(draft.models[draft.file()].graph.value_info)
    if not ports:
        return False
    tensor = draft.chance.choice(ports).type.tensor_type
    tensor.elem_type = draft.chance.choice([kind for kind in (1, 6, 7, 10) if kind != tensor.elem_type])
    return True


def expressions(draft: Draft) -> bool:
    """A dim of a declared value is another one."""
    ports = [port for port in draft.models[draft.file()].graph.value_info if port.type.tensor_type.shape.dim]
    if not ports:
        return False
    dim = draft.chance.choice(list(draft.chance.choice(ports).type.tensor_type.shape.dim))
    if dim.HasField("dim_value"):
        dim.dim_value += 1
    else:
        dim.dim_param = draft.chance.choice([f"{dim.dim_param} + 1", f"2*({dim.dim_param})", f"({dim.dim_param})/2"])
    return True


def shapes(draft: Draft) -> bool:
    """A shape of the manifest is another one."""
    parts = ("collectives", "transfers", "inputs", "outputs", "state")
    records = [one for part in parts for one in draft.manifest[part] if one["shape"]]
    if not records:
        return False
    shape = draft.chance.choice(records)["shape"]
    axis = draft.chance.randrange(len(shape))
    shape[axis] = shape[axis] + 1 if isinstance(shape[axis], int) else f"2*({shape[axis]})"
    return True


def programs(draft: Draft) -> bool:
    """Two ranks change their programs, or one gets another one's."""
    count = draft.manifest["ranks"]
    names = draft.manifest["rank_files"] or [f"rank_{rank:04d}.onnx" for rank in range(count)]
    one, two = draft.chance.sample(range(count), 2)
    if names[one] == names[two]:
        return False
    names[one], names[two] = (names[two], names[one]) if draft.chance.random() < 0.5 else (names[two], names[two])
    draft.manifest["rank_files"] = names
    return True


def port_boxes(part: str) -> Mutation:
    """Two ranks change their shards of an input, an output or a tensor."""

    def change(draft: Draft) -> bool:
        records = [
            one for one in draft.manifest[part] if one.get("boxes") and len({str(box) for box in one["boxes"]}) > 1
        ]
        if not records:
            return False
        places = draft.chance.choice(records)["boxes"]
        one, two = draft.chance.sample(range(len(places)), 2)
        if places[one] == places[two]:
            return False
        places[one], places[two] = places[two], places[one]
        return True

    return change


def weights(draft: Draft) -> bool:
    """Two ranks change the data of a weight."""
    by_name: dict[str, list[TensorProto]] = {}
    for _, model in sorted(draft.models.items()):
        for tensor in model.graph.initializer:
            by_name.setdefault(tensor.name, []).append(tensor)
    pairs = [some for some in by_name.values() if len(some) > 1]
    if not pairs:
        return False
    one, two = draft.chance.sample(draft.chance.choice(pairs), 2)
    if one.external_data and two.external_data:
        for key in ("location", "offset"):
            first, second = (next(entry for entry in each.external_data if entry.key == key) for each in (one, two))
            first.value, second.value = second.value, first.value
    elif one.raw_data and two.raw_data and one.dims == two.dims:
        one.raw_data, two.raw_data = two.raw_data, one.raw_data
    else:
        return False
    return True


def offset(draft: Draft) -> bool:
    """A weight's data begins elsewhere."""
    tensors = [one for one in draft.models[draft.file()].graph.initializer if one.external_data]
    if not tensors:
        return False
    entry = next(one for one in draft.chance.choice(tensors).external_data if one.key == "offset")
    entry.value = str(int(entry.value) + draft.chance.choice([-256, -4, 4, 64, 256]))
    return True
