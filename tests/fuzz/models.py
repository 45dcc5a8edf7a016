"""Models that no exporter should write, compiled: bytes and structures changed, and `model.py` files that fail in every way.

python tests/fuzz/models.py --minutes 5 --seed 1
"""

from __future__ import annotations

import functools
import random
from math import prod
from pathlib import Path

import onnx
from edits import edit, flips
from pool import command, main
from small import proto

TEXTS = {
    "layers": "",
    "pictures": """g (float[n, 3, 12, 8] x) => (float[n, m] y) <float[4, 3, 3, 3] k, float[4] scale = {1, 1, 1, 1}> {
        [conv] c = Conv <pads = [1, 1, 1, 1]> (x, k)  [act] r = Relu(c)  [pool] p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        [norm] b = BatchNormalization(p, scale, scale, scale, scale)  [mean] a = GlobalAveragePool(b)  [flat] y = Flatten(a) }""",
    "shapes": """g (float[n, s, 8] x) => (float[n, s, 8] y) <int64[1] minus = {-1}, int64[1] eight = {8}, float[8, 8] w> {
        shape = Shape(x)  front = Slice(shape, zero, two)  merged = ReduceProd <keepdims = 1> (front)
        [to] target = Concat <axis = 0> (merged, eight)  flat = Reshape(x, target)  [mm] m = MatMul(flat, w)
        [soft] a = Softmax <axis = -1> (m)  y = Reshape(a, shape)
        zero = Constant <value_ints = [0]> ()  two = Constant <value_ints = [2]> () }""",
    "bodies": """g (float[n, 6] x, bool flag) => (float[n, 6] y) <int64 trips = {3}, bool go = {1}, float[6, 6] w> {
        [choice] a = If (flag) <then_branch = t () => (float[n, 6] p) { p = Relu(x) },
            else_branch = e () => (float[n, 6] q) { q = Tanh(x) }>
        y = Loop (trips, go, a) <body = b (int64 i, bool c, float[n, 6] v) => (bool d, float[n, 6] z) {
            d = Identity(c)  z = MatMul(v, w) }> }""",
}
PLANS = {
    "layers": [
        "ranks: 3\nplacement: {up: 0, down: 2}\n",
        "ranks: 2\nsymbols: {n: {divisor: 2}}\nsharding: {up: colwise, down: rowwise}\n",
    ],
    "pictures": [
        "ranks: 2\nplacement: {conv: 0, pool: 1}\n",
        "ranks: 2\nsymbols: {n: {divisor: 2}}\ndataset: data_parallel\n",
    ],
    "shapes": ["ranks: 2\nplacement: {mm: 1}\n", "ranks: 2\nsharding: {mm: colwise}\n"],
    "bodies": ["ranks: 2\nplacement: {choice: 1}\n", "ranks: 1\n"],
}
LEARN = (
    "ranks: 2\nsymbols: {n: {divisor: 2}}\ndataset: data_parallel\n"
    "train: {loss: {type: mean_squared, prediction: y, target: goal}, optimizer: {type: adam, lr: 0.1}}\n"
)

SCRIPT = """from partc.compiler import Input, Symbol, nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.act = nn.ReLU()
        self.down = nn.Linear(12, 5)

    def forward(self, op, x):
        @
        return self.down(op, self.act(op, self.up(op, x)))

model = Network()
inputs = {"x": Input([Symbol(min=1), 6], "float32")}
outputs = ["y"]
"""
LINES = [
    "raise ValueError('mine')",
    "raise KeyError(3)",
    "raise SystemExit(3)",
    "raise KeyboardInterrupt",
    "return None",
    "return 3",
    "return x, x",
    "return op",
]
LINES += [
    "1 / 0",
    "import no_such_module",
    "self.forward(op, x)",
    "x = x + x",
    "op.MatMul(x, 3)",
    "op.NoSuch(x)",
    "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()",
]
LINES += [
    "assert False",
    "raise StopIteration",
    "raise GeneratorExit",
    "x = None",
    "return self.up(op)",
    "return op.Constant()",
    "self.up.weight = None",
    "raise UnicodeDecodeError('a', b'b', 0, 1, 'c')",
]
LINES += [
    "return [x]",
    "return {'y': x}",
    "return op.Reshape(x, x)",
    "raise MemoryError",
    "raise RecursionError",
    "raise Exception('a\\n' * 50)",
    "exit()",
    "raise ExceptionGroup('g', [ValueError()])",
    "del self.up",
]


@functools.cache
def base(name: str) -> bytes:
    """The bytes of a sound model."""
    if not TEXTS[name]:
        data: bytes = proto().SerializeToString(deterministic=True)
        return data
    found = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {TEXTS[name]}')
    there = {tensor.name for tensor in found.graph.initializer}
    for port in [port for port in found.graph.value_info if port.name in ("k", "w", "scale")]:
        dims = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        if port.name not in there:
            numbers = [0.25 * (at % 7) for at in range(prod(dims))]
            found.graph.initializer.append(onnx.helper.make_tensor(port.name, 1, dims, numbers))
    data = found.SerializeToString(deterministic=True)
    return data


def script(chance: random.Random) -> str:
    """A `model.py` that fails, or whose text is damaged."""
    text = SCRIPT.replace("@", chance.choice(LINES) if chance.random() < 0.7 else "pass")
    if chance.random() < 0.5:
        lines = text.splitlines()
        match chance.randrange(4):
            case 0:
                del lines[chance.randrange(len(lines))]
            case 1:
                lines.insert(chance.randrange(len(lines)), chance.choice(LINES))
            case 2:
                at = chance.randrange(len(lines))
                lines[at] = lines[at].replace(
                    chance.choice(["6", "12", "5", "Net", "x", "self", '"', "n"]),
                    chance.choice(["", "0", "-1", "None", "1e9", "{}", "'", "7"]),
                )
            case _:
                return flips(chance, text.encode()).decode("utf-8", "surrogateescape")
        text = "\n".join(lines)
    return text


def work(chance: random.Random, folder: Path) -> str:
    """Compiles such a model by a plan that fits the sound one."""
    name = chance.choice(sorted(TEXTS))
    plan = chance.choice([*PLANS[name], *PLANS[name], LEARN])
    kind = chance.choices(("structure", "bytes", "script"), (8, 3, 2))[0]
    if kind == "script":
        path = folder / "model.py"
        path.write_bytes(script(chance).encode("utf-8", "surrogateescape"))
        plan = chance.choice(PLANS["layers"])
    else:
        path, data = folder / "model.onnx", base(name)
        if kind == "structure":
            found = onnx.ModelProto.FromString(data)
            edit(chance, found)
            data = found.SerializeToString()
        path.write_bytes(flips(chance, data) if kind == "bytes" else data)
        (folder / "data.bin").write_bytes(bytes(512))
    (folder / "plan.yaml").write_text(plan)
    return command("compile", str(path), "--plan", str(folder / "plan.yaml"), "-o", str(folder / "b"))


if __name__ == "__main__":
    main(work, "models")
