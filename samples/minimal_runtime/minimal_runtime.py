"""A runtime for artifacts of partc that does not import partc, written from their specification, `runtime/README.md`.

mpiexec -n 2 python -m mpi4py minimal_runtime.py ARTIFACT inputs.npz outputs.npz

The inputs are the global ones of the model; an artifact that trains takes a step for each batch of their records.
"""

import ctypes
import json
import math
import re
import sys
from fractions import Fraction
from functools import partial, reduce
from itertools import groupby
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, helper, inliner, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype as dtype_of
from onnxruntime import InferenceSession, OrtValue, SessionOptions

REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
FUNCTIONS = {"floor": math.floor, "ceiling": math.ceil, "trunc": math.trunc, "Max": max, "Min": min, "Abs": abs}
BFLOAT16, SMALL_FLOATS = onnx.TensorProto.BFLOAT16, ("float16", "bfloat16")
FUNCTIONS |= {"Mod": lambda a, b: a % b, "Fraction": Fraction, "__builtins__": {}}


class Refused(SystemExit):
    """The end of the program, with what an artifact needs and this runtime does not do."""


def ranks_of(ranks):
    """A list of ranks, also from its compressed text: `0-3,8`, and `0-56:8` for every eighth."""
    runs = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", ranks) if isinstance(ranks, str) else ()
    spans = (range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in runs)
    return [rank for span in spans for rank in span] or ranks


def box_of(record, rank):
    """The box of a rank's shard: `begin, end, denominator` of each dim; empty where the rank has the whole value."""
    index, box = ranks_of(record["ranks"]).index(rank), []
    boxes = record["boxes"] or [[]] * (index + 1)
    if isinstance(boxes, list):
        return boxes[index]
    place, parts = np.unravel_index(index, boxes["mesh"]), boxes.get("part") or [(0, 1, 1)] * len(boxes["cuts"])
    for axes, (begin, end, of) in zip(boxes["cuts"], parts, strict=True):
        at, count = 0, 1
        for axis in axes:
            at, count = at * boxes["mesh"][axis] + int(place[axis]), count * boxes["mesh"][axis]
        box.append([begin * count + at * (end - begin), begin * count + (at + 1) * (end - begin), of * count])
    return box


def cut(array, box):
    """The part of an array in a box, which is fractions of its first dims."""
    bounds = zip(array.shape, box, strict=False)
    return array[(*(slice(size * begin // of, size * end // of) for size, (begin, end, of) in bounds), ...)]


def assembled(parts):
    """The array of which the parts are, pairs of box and array; the size of a dim follows from any part."""
    box, array = parts[0]
    shape = [size * of // (end - begin) for size, (begin, end, of) in zip(array.shape, box, strict=False)]
    whole = np.empty((*shape, *array.shape[len(shape) :]), array.dtype)
    for box, array in parts:
        cut(whole, box)[...] = array
    return whole


def evaluated(expression, names):
    """The exact number of an expression: a dim, or an item of a RankConstant."""
    if not re.fullmatch(r"[\w\s()+*/%,-]*", expression):
        raise Refused(f"not done here: the expression '{expression}'")
    return eval(re.sub(r"\b(\d+)\b", r"Fraction(\1)", expression), FUNCTIONS, dict(names))


def scalar(training, name, step):
    """A number of a step, counted from 0, that an optimizer reads: `lr`, or `adam_2.bias1` of one of several."""
    (other, _, name), record, k = name.rpartition("."), training["optimizer"], step + 1
    hyper = {"beta1": 0, "beta2": 0, "beta2_decay": 0, **(record["others"][other] if other else record)["hyper"]}
    rate = learning_rate(training["settings"].get("schedule") or {"type": "constant"}, record["lr"], step)
    numbers = {"step": step, "lr": rate, "scale": hyper.get("scale", 1.0), "bound": k**-0.5}
    numbers |= {"bias1": 1 - hyper["beta1"] ** k, "bias2": 1 - hyper["beta2"] ** k, "forget": k ** hyper["beta2_decay"]}
    return np.asarray(numbers[name], np.int64 if name == "step" else np.float32)


def learning_rate(schedule, rate, step):
    """The rate of a step, counted from 0."""
    kind, warmup, last = schedule["type"], schedule.get("warmup", 0), schedule.get("minimum", 0.0)
    ramp = min(1.0, (step + (not schedule.get("from_zero"))) / warmup) if warmup else 1.0
    if schedule.get("after_warmup"):
        step, warmup = max(step - warmup, 0), 0
    if kind in ("linear", "polynomial", "cosine"):
        left = 1 - min(max(step - warmup, 0) / (schedule["steps"] - warmup), 1.0)
        share = (1 - math.cos(math.pi * left)) / 2 if kind == "cosine" else left ** schedule.get("power", 1.0)
        rate = last + (rate - last) * share
    elif kind != "constant":
        raise Refused(f"not done here: a learning rate of the type {kind}")
    return rate * ramp


def attributes_of(node):
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def to_session(array):
    """An array as a session reads it; numpy has bfloat16 from a library that onnxruntime does not know."""
    if array.dtype == "bfloat16":
        return OrtValue.ortvalue_from_numpy_with_onnx_type(np.array(array, order="C").view(np.uint16), BFLOAT16)
    return OrtValue.ortvalue_from_numpy(np.asarray(array))


def from_session(value):
    """The array of a value."""
    if not value.is_tensor():
        raise Refused(f"not done here: a {value.data_type()} that is read after a communication")
    if value.element_type() != BFLOAT16:
        return value.numpy()
    bits = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(bits, dtype_of(BFLOAT16)).reshape(value.shape())


def names_in(nodes):
    """The names that nodes read, also in graphs within them."""
    graphs = [attribute.g for node in nodes for attribute in node.attribute]
    names = {name for node in nodes for name in node.input} | {value.name for graph in graphs for value in graph.output}
    return names.union(*(names_in(graph.node) for graph in graphs))


def communicates(node):
    """Whether a node is a communication, or the ranks of a group run its bodies together."""
    return node.domain == "partc.comm" or any(entry.key == "partc.group" for entry in node.metadata_props)


class Segment:
    """The nodes between two communications: a session, made when the types of its inputs are known."""

    def __init__(self, nodes, runtime, later):
        self.nodes, self.model, self.session, self.names = nodes, runtime.model, None, names_in(nodes)
        self.weights = [runtime.weights[name] for name in sorted(self.names & runtime.weights.keys())]
        self.names -= runtime.weights.keys() | {name for node in nodes for name in node.output}
        self.outputs = [name for node in nodes for name in node.output if name in later]

    def __call__(self, values):
        feeds = {name: to_session(values[name]) for name in sorted(self.names & values.keys())}
        if self.session is None:
            inputs = [helper.make_tensor_value_info(name, value.element_type(), None) for name, value in feeds.items()]
            outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
            graph = helper.make_graph(self.nodes, "segment", inputs, outputs, self.weights)
            model = helper.make_model(graph, opset_imports=self.model.opset_import, functions=self.model.functions)
            model.ir_version, options = self.model.ir_version, SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 3
            self.session = InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        results = self.session.run_with_ort_values(self.outputs, feeds)
        values.update(zip(self.outputs, map(from_session, results), strict=True))


class Runtime:
    """A rank of an artifact's main program; `comm` is mpi4py's. All ranks make the same calls, with the global inputs."""

    def __init__(self, folder, comm):
        self.manifest = manifest = json.loads((Path(folder) / "manifest.json").read_text())
        self.comm, self.rank, self.size, self.step = comm, comm.Get_rank(), comm.Get_size(), 0
        if (manifest["format"], manifest["ranks"]) != (3, self.size):
            raise Refused(f"format {manifest['format']} for {manifest['ranks']} ranks, not format 3 for {self.size}")
        self.program = next(iter(manifest["programs"].values()))
        if outside := [record["path"] for record in manifest["files"].values() if record.get("path")]:
            raise Refused(f"not done here: weights outside of the artifact, in {outside[0]}")
        if lookups := {"Pull", "Push", "Return", "Route"} & {record["op"] for record in self.program["collectives"]}:
            raise Refused(f"not done here: {' and '.join(sorted(lookups))}, lookups of rows that other ranks have")
        lists = {**manifest["groups"], **self.program["groups"]}.items()
        self.groups = {name: ranks_of(one) for name, ranks in lists for one in ranks if self.rank in ranks_of(one)}
        self.model, self.constants = self.read(Path(folder)), {}
        self.weights = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.fed = {value.name: value.type.tensor_type for value in self.model.graph.input}
        if drawn := [record["tensor"] for record in manifest["state"] if isinstance(record["initial"], dict)]:
            raise Refused(f"not done here: {drawn[0]}, a parameter that is drawn from a seed")
        self.state, self.kept = {}, []
        for tensor, names in self.program["kept"].items():
            held = [record for record in manifest["state"] if record["tensor"] == tensor]
            for record, name in zip(held, names if isinstance(names, list) else [names] * len(held), strict=True):
                if self.rank in ranks_of(record["ranks"]):
                    self.kept.append((record, name))
                    self.state[record["value"]] = self.initial(record)
        self.steps = self.divided(self.model.graph.node, {value.name for value in self.model.graph.output})

    def read(self, folder):
        """The rank's file, with the calls of tasks written out: the order of nodes is that of messages."""
        files = self.program["rank_files"] or [f"rank_{rank:04d}.onnx" for rank in range(self.size)]
        if isinstance(files, dict):
            files = {rank: file for file, ranks in files.items() for rank in ranks_of(ranks)}
        model = onnx.load(folder / files[self.rank], load_external_data=False)
        tasks = [(body.domain, body.name) for body in model.functions if body.domain == "partc.task"]
        model = inliner.inline_selected_functions(model, tasks) if tasks else model
        external_data_helper.load_external_data_for_model(model, str(folder))
        for weight in model.graph.initializer:
            for kept in [entry.value for entry in weight.metadata_props if entry.key == "partc.stored"]:
                weight.raw_data = np.frombuffer(weight.raw_data, kept).astype(np.float32).tobytes()
        return model

    def initial(self, record):
        """The first value of a tensor of the state, which is an input and no longer a weight."""
        if weight := self.weights.pop(record["value"], None):
            return numpy_helper.to_array(weight)
        whole = np.full(record["shape"], record["initial"], dtype_of(self.fed[record["value"]].elem_type))
        return cut(whole, box_of(record, self.rank))

    def divided(self, nodes, later):
        """The steps of the program or of a body in their order, functions of its values by name; `later` are read after them."""
        runs = [(key, list(run)) for key, run in groupby(nodes, communicates)]
        constants = later.union(*(names_in(run) for is_communication, run in runs if is_communication))
        constants &= self.weights.keys()
        self.constants |= {name: numpy_helper.to_array(self.weights[name]) for name in constants}
        steps = []
        for is_communication, run in reversed(runs):
            calls = [self.call(node) for node in run] if is_communication else [Segment(run, self, later)]
            steps, later = calls + steps, later | names_in(run)
        return steps

    def call(self, node):
        """The step of a node that communicates, or in whose bodies nodes do."""
        if node.domain == "partc.comm":
            return partial(self.communicate, node)
        graphs = {attribute.name: attribute.g for attribute in node.attribute}
        names = {name: [value.name for value in graph.output] for name, graph in graphs.items()}
        bodies = {name: (self.divided(graph.node, {*names[name]}), names[name]) for name, graph in graphs.items()}
        inputs = [value.name for graph in graphs.values() for value in graph.input]
        return partial(self.branch if node.op_type == "If" else self.turns, node, bodies, inputs)

    def body(self, body, values):
        """Runs a body, and returns what it gives."""
        steps, names = body
        for step in steps:
            step(values)
        return [values[name] for name in names]

    def branch(self, node, bodies, _, values):
        """Runs the branch of an If that its condition chooses."""
        made = self.body(bodies["then_branch" if values[node.input[0]].all() else "else_branch"], values)
        values.update(zip(node.output, made, strict=True))

    def turns(self, node, bodies, inputs, values):
        """Runs a Loop, whose ranks take as many turns."""
        count, going, *states = [values.get(name) for name in node.input]
        k, stacks = 0, []
        while (going is None or going.all()) and (count is None or k < count):
            values.update(zip(inputs, [np.asarray(k), np.asarray(True), *states], strict=True))
            going, *made = self.body(bodies["body"], values)
            states, k = made[: len(states)], k + 1
            stacks.append(made[len(states) :])
        if not stacks and len(node.output) > len(states):
            raise Refused(f"not done here: no turn of {node.name}, which stacks what turns make")
        values.update(zip(node.output, [*states, *map(np.stack, zip(*stacks, strict=True))], strict=True))

    def swapped(self, parts, sources):
        """Sends its part to each rank of `parts`; returns what each of the sources sends here."""
        requests = [self.comm.isend(part, dest=rank) for rank, part in parts.items() if rank != self.rank]
        received = [parts[rank] if rank == self.rank else self.comm.recv(source=rank) for rank in sources]
        for request in requests:
            request.wait()
        return received

    def reduced(self, parts, sources, reduction):
        """The reduction of what the sources send, in their order; of floats below 32 bits in float32."""
        arrays = self.swapped(parts, sources)
        wide = [array.astype(np.float32) if array.dtype in SMALL_FLOATS else array for array in arrays]
        return reduce(REDUCTIONS[reduction], wide).astype(arrays[0].dtype) if arrays else None

    def communicate(self, node, values):
        """Runs a node of the domain `partc.comm`; there is one target, the CPU, so that a Copy does nothing."""
        said, x = attributes_of(node), [values.get(name) for name in node.input]
        ranks = self.groups[said["group"]] if "group" in said else [said.get("peer")]
        root, axis, reduction = ranks[said.get("root", 0)], said.get("axis", 0), said.get("reduce")
        match node.op_type:
            case "Copy":
                y = x
            case "RankConstant":
                items = [float(evaluated(item.decode(), {"place": ranks.index(self.rank)})) for item in said["items"]]
                y = [np.array(items).reshape(said.get("shape", ())).astype(dtype_of(said["dtype"]))]
            case "Send" | "Recv":
                y = self.swapped({ranks[-1]: x[0]}, []) if x else self.swapped({}, ranks[:1])
            case "AllReduce" | "Reduce":
                to = [root] if node.op_type == "Reduce" else ranks
                y = [self.reduced(dict.fromkeys(to, array), ranks if self.rank in to else [], reduction) for array in x]
            case "ReduceScatter":
                shards = [dict(zip(ranks, np.split(array, len(ranks), axis), strict=True)) for array in x]
                y = [self.reduced(parts, ranks, reduction) for parts in shards]
            case "AllGather":
                y = [np.concatenate(self.swapped(dict.fromkeys(ranks, array), ranks), axis) for array in x]
            case "AllToAll":
                parts = dict(zip(ranks, np.split(x[0], len(ranks), said["split_axis"]), strict=True))
                y = [np.concatenate(self.swapped(parts, ranks), said["concat_axis"])]
            case "Broadcast":
                y = self.swapped(dict.fromkeys(ranks, x[0]) if self.rank == root else {}, [root])
            case "Exchange":
                y = self.exchanged(*x, **said)
        values.update(zip(node.output, y, strict=False))

    def exchanged(self, x=None, rank=0, send_peers=(), send_boxes=(), recv_peers=(), recv_boxes=(), **_):
        """Sends boxes of `x` to ranks; what they send are the boxes of the result."""
        parts = {peer: [] for peer in send_peers}
        for peer, box in zip(send_peers, np.reshape(send_boxes, (-1, rank, 3)).tolist(), strict=True):
            parts[peer].append(cut(x, box))
        peers = list(dict.fromkeys(recv_peers))
        arrived = {peer: iter(arrays) for peer, arrays in zip(peers, self.swapped(parts, peers), strict=True)}
        boxes = zip(recv_peers, np.reshape(recv_boxes, (-1, rank, 3)).tolist(), strict=True)
        return [assembled([(box, next(arrived[peer])) for peer, box in boxes])] if peers else []

    def __call__(self, inputs):
        """The outputs of a step by name, whole, on rank 0."""
        training, values, symbols = self.manifest["training"], {**self.constants, **self.state}, {}
        for port in self.program["inputs"]:
            is_scalar = training and port["name"] in training["scalars"]
            array = scalar(training, port["name"], self.step) if is_scalar else inputs[port["name"]]
            symbols |= dict(zip(port["shape"] or (), array.shape, strict=False))
            if self.rank in ranks_of(port["ranks"]):
                values[port["name"]] = cut(array, box_of(port, self.rank))
        for name in self.fed.keys() - values.keys():  # inputs whose sizes are read here, but no elements
            dims = [evaluated(dim.dim_param or str(dim.dim_value), symbols) for dim in self.fed[name].shape.dim]
            values[name] = np.zeros([int(dim) for dim in dims], dtype_of(self.fed[name].elem_type))
        for step in self.steps:
            step(values)
        skipped = training and training["guard"] and not np.isfinite(values[training["guard"]])
        for record, name in self.kept:
            if name and (record["kind"] == "scale" or not skipped):
                self.state[record["value"]] = values[name]
        self.step += 1
        return self.joined([(port["name"], port, values.get(port["name"])) for port in self.program["outputs"]])

    def joined(self, records):
        """The values that ports or records of tensors describe, by name, whole, on rank 0."""
        records = [record for record in records if self.rank in ranks_of(record[1]["ranks"])]
        mine = [(name, box_of(record, self.rank), value) for name, record, value in records]
        parts = {}
        for sent in self.swapped({0: mine}, range(self.size) if self.rank == 0 else []):
            for name, box, array in sent:
                parts.setdefault(name, []).append((box, array))
        return {name: assembled(pairs) for name, pairs in parts.items()}

    def tensors(self):
        """The state by the global names of its tensors, whole, on rank 0."""
        return self.joined([(record["tensor"], record, self.state[record["value"]]) for record, _ in self.kept])


def main(folder, inputs, outputs):
    """Runs an artifact on the arrays of a file; a training's outputs are also the tensors of its state."""
    from mpi4py import MPI

    runtime, arrays = Runtime(folder, MPI.COMM_WORLD), dict(np.load(inputs))
    training, steps = runtime.manifest["training"], [arrays]
    if training:
        records, batch = arrays.keys() - training["fixed"], training["settings"]["batch"]
        dims = {port["name"]: port.get("batch_dim", 0) for port in runtime.program["inputs"]}
        begins = range(0, min(arrays[name].shape[dims[name]] for name in records) - batch + 1, batch)
        steps = [arrays | {x: arrays[x].take(range(at, at + batch), dims[x]) for x in records} for at in begins]
    results = [runtime(step) for step in steps]
    found = runtime.tensors() if training else {}
    if runtime.rank == 0:
        for name, array in results[0].items():
            found[name] = np.stack([result[name] for result in results]) if training else array
            print(name, found[name].shape, np.ravel(found[name])[:3].round(3))
        np.savez(outputs, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
