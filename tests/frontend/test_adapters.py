"""`adapters` of a plan: a model with an adapter computes what it computes with W + scale * B A, in any layout; other forms are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from adapter_files import write_adapter
from equivalence import counted
from onnx import helper, numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.precision import Blocks
from partc.compiler.plan.read import parse_plan
from partc.compiler.quantize import _dequantized, _quantize
from partc.runtime import load_local
from safetensors.numpy import load_file, save_file
from training_equivalence import fed, tensors

F = np.float32
SIZES = {"layers.0.up": (12, 32), "layers.0.down": (32, 10), "layers.1.up": (10, 64), "layers.1.down": (64, 14)}
"""The inputs and outputs of each linear layer: `up` is Transpose and MatMul, `down` a Gemm whose rows are merged, as GPT-2's Conv1D."""
LAYOUTS = {
    "one": "ranks: 1\n",
    "tensor parallel": 'ranks: 2\nmesh: {tp: 2}\nsharding: {"layers.*.up": colwise, "layers.*.down": rowwise}\n',
    "stages": "ranks: 2\nplacement: {layers.0: 0, layers.1: 1}\n",
}
TRAIN = """train:
  loss: {type: mse, prediction: y, target: label}
  optimizer: {type: sgd, lr: 0.1}
  batch: 4
"""


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {name: (size[::-1] if name.endswith("up") else size) for name, size in SIZES.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(F) / 4 for name, shape in shapes.items()}


def model(numbers: dict[str, np.ndarray]) -> onnx.ModelProto:
    nodes, constants, x = [], {**numbers}, "x"
    for name, (inputs, outputs) in SIZES.items():
        y, weight = f"{name}.y", f"{name}.weight"
        if name.endswith("up"):
            nodes += [
                helper.make_node("Transpose", [weight], [f"{name}.t"], f"{name}.Transpose", perm=[1, 0]),
                helper.make_node("MatMul", [x, f"{name}.t"], [y], f"{name}.MatMul"),
                helper.make_node("Relu", [y], [f"{name}.relu"], f"{name}.Relu"),
            ]
            x = f"{name}.relu"
        else:
            constants[f"{name}.bias"] = np.linspace(-1, 1, outputs, dtype=F)
            constants[f"{name}.rows"] = np.array([-1, inputs])
            nodes += [
                helper.make_node("Reshape", [x, f"{name}.rows"], [f"{name}.x"], f"{name}.Merge"),
                helper.make_node("Gemm", [f"{name}.x", weight, f"{name}.bias"], [f"{name}.z"], f"{name}.Gemm"),
                helper.make_node("Reshape", [f"{name}.z", f"{name}.shape"], [f"{name}.z3"], f"{name}.Apart"),
            ]
            constants[f"{name}.shape"] = np.array([-1, 5, outputs])
            x = f"{name}.z3"
    nodes[-1].output[0] = "y"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["batch", 5, 12])],
        [helper.make_tensor_value_info("y", 1, ["batch", 5, 14])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made)
    return made


def adapter(folder: Path, ranks: dict[str, int], **settings: Any) -> dict[str, np.ndarray]:
    """Writes an adapter, and returns what it adds to each weight, by name."""
    sizes = {name: SIZES.get(name, (12, 32)) for name in ranks}
    more = write_adapter(folder, sizes, ranks, **settings)
    return {f"{name}.weight": added if name.endswith("up") else added.T for name, added in more.items()}


def compiled(tmp_path: Path, text: str) -> tuple[Path, Complete]:
    """The base by a plan whose file is in the folder of the adapters."""
    source = Source(from_proto(model(weights()), Path("model.onnx")))
    out = tmp_path / "build"
    return out, compile_source(source, parse_plan(text, str(tmp_path / "plan.yaml")), out).program


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_adds_its_product(tmp_path: Path, layout: str) -> None:
    """All layers with ranks and alphas by pattern, and half of them with rslora; no message is added."""
    x = np.random.default_rng(2).standard_normal((3, 5, 12)).astype(F)
    base = counted(compiled(tmp_path, LAYOUTS[layout])[1])
    for ranks, settings in (
        ({"layers.0.up": 4, "layers.0.down": 3, "layers.1.up": 5, "layers.1.down": 2}, {"alpha_pattern": {"up": 9}}),
        ({"layers.0.down": 3, "layers.1.up": 1}, {"use_rslora": True}),
    ):
        more = adapter(tmp_path / "sql", ranks, **settings)
        merged = {name: (array + more.get(name, 0)).astype(F) for name, array in weights().items()}
        out, program = compiled(tmp_path, f"{LAYOUTS[layout]}adapters: {{sql: sql}}\n")
        assert counted(program) == base
        with load_local(out) as ranks_of_job:
            have = ranks_of_job({"x": x})["y"]
        np.testing.assert_allclose(have, reference(merged, x), rtol=1e-5, atol=1e-5)
        assert np.abs(have - reference(weights(), x)).max() > 0.1


def reference(numbers: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    for name in SIZES:
        if name.endswith("up"):
            x = np.maximum(x @ numbers[f"{name}.weight"].T, 0)
        else:
            x = x @ numbers[f"{name}.weight"] + np.linspace(-1, 1, SIZES[name][1], dtype=F)
    return x


def saved(folder: Path, modules: list[str], files: dict[str, np.ndarray]) -> None:
    """Adds whole modules to a folder, as peft saves them."""
    _config(modules_to_save=modules)(folder)
    _tensors(lambda one: one.update({f"base_model.model.{name}": array for name, array in files.items()}))(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_that_peft_saved_replace_those_of_the_model(tmp_path: Path, layout: str) -> None:
    """Of a task's head, of which peft lists names that the model may not have."""
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((3, 5, 12)).astype(F), rng.standard_normal((64, 14)).astype(np.float16)
    more = adapter(tmp_path / "sql", {"layers.0.up": 4})
    bias = np.linspace(2, 3, 14, dtype=F)
    saved(tmp_path / "sql", ["1.down", "score"], {"layers.1.down.weight": weight, "layers.1.down.bias": bias})
    out, _ = compiled(tmp_path, f"{LAYOUTS[layout]}adapters: {{sql: sql}}\n")
    numbers = {name: (array + more.get(name, 0)).astype(F) for name, array in weights().items()}
    want = reference({**numbers, "layers.1.down.weight": weight.astype(F)}, x) - np.linspace(-1, 1, 14, dtype=F) + bias
    with load_local(out) as ranks:
        np.testing.assert_allclose(ranks({"x": x})["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "plan", "told"),
    [
        ("layers.1.down.weight", (64, 13), "", "it is [64, 13], of the model [64, 14]\n"),
        ("layers.1.head.weight", (64, 14), "", "'layers.1.head.weight': the model has no such weight\n"),
        ("layers.0.down.weight", (32, 10), "", "'layers.0.down.weight': of the model it is also read by 'tied.Identity'\n"),
        ("layers.1.down.weight", (64, 14), f"train{TRAIN[5:]}", "'sql' replaces 'layers.1.down.weight'\n"),
        ("layers.1.down.weight", (64, 14), 'quantize: {"**.down": {block: 16}}\n', "the model has no such weight\n"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_replaced(
    tmp_path: Path, name: str, shape: tuple[int, int], plan: str, told: str
) -> None:
    adapter(tmp_path / "sql", {"layers.0.up": 4})
    saved(tmp_path / "sql", ["down", "head"], {name: np.ones(shape, F)})
    tied = model(weights())
    tied.graph.node.append(helper.make_node("Identity", ["layers.0.down.weight"], ["same"], "tied.Identity"))
    tied.graph.output.append(helper.make_tensor_value_info("same", 1, [32, 10]))
    train = ", train: true" if plan.startswith("train") else ""
    text = f"ranks: 1\nadapters: {{sql: {{source: sql{train}}}}}\n{plan}"
    source = Source(from_proto(tied, Path("model.onnx")))
    with pytest.raises(CompileError) as caught:
        compile_source(source, parse_plan(text, str(tmp_path / "plan.yaml")), tmp_path / "build")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "bits"), [("one", 8), ("tensor parallel", 0), ("tensor parallel", 4), ("stages", 0)]
)
def test_a_trained_adapter_follows_its_gradient(tmp_path: Path, layout: str, bits: int) -> None:
    """A step of gradient descent against the formula's, by differences; what a checkpoint keeps is the adapter alone."""
    adapter(tmp_path / "sql", {"layers.0.up": 4, "layers.1.down": 3})
    first = load_file(tmp_path / "sql" / "adapter_model.safetensors")
    rng = np.random.default_rng(3)
    x, label = rng.standard_normal((4, 5, 12)).astype(F), rng.standard_normal((4, 5, 14)).astype(F)
    base, quantize = weights(), ""
    if bits:
        quantize = f'quantize: {{"layers.*.down": {{bits: {bits}, block: 16, accuracy_level: 1}}}}\n'
        for name in ("layers.0.down.weight", "layers.1.down.weight"):
            base[name] = _dequantized(*_quantize(base[name], Blocks(bits=bits, block=16)), bits).T
    out, _ = compiled(tmp_path, f"{LAYOUTS[layout]}{quantize}adapters: {{sql: {{source: sql, train: true}}}}\n{TRAIN}")
    with load_local(out) as ranks:
        ranks({"x": x, "label": label, **fed(ranks, 1)})
        now = tensors(ranks)
    assert {name.removeprefix("base_model.model.") for name in first} <= now.keys()

    def loss(change: dict[str, np.ndarray]) -> float:
        numbers = {name: array.astype(float) for name, array in base.items()}
        for name in ("layers.0.up", "layers.1.down"):
            a, b = (change[f"{name}.lora_{key}.weight"].astype(float) for key in "AB")
            added = 6 / len(a) * (b @ a)
            numbers[f"{name}.weight"] += added if name.endswith("up") else added.T
        return float(((reference(numbers, x.astype(float)) - label) ** 2).mean())

    begin = {name.removeprefix("base_model.model."): array for name, array in first.items()}
    for name, array in begin.items():
        direction, step = rng.standard_normal(array.shape), 1e-5
        slope = (loss({**begin, name: array + step * direction}) - loss({**begin, name: array - step * direction})) / (
            2 * step
        )
        moved = float(((array - now[name]) * direction).sum()) / 0.1
        assert moved == pytest.approx(slope, rel=2e-3, abs=1e-4), name
    assert not now.keys() & weights().keys()


def test_a_new_adapter_adds_nothing(tmp_path: Path) -> None:
    """It begins as peft's: A is uniform, B is zeros; of the model it alone is trained."""
    out, program = compiled(
        tmp_path, f'ranks: 1\nadapters: {{new: {{on: "**.up", rank: 2, alpha: 8, seed: 3, train: true}}}}\n{TRAIN}'
    )
    assert program.training is not None
    with load_local(out) as ranks:
        now = tensors(ranks)
    assert sorted(name for name in now if "lora" in name) == [
        f"layers.{k}.up.lora_{key}.weight" for k in range(2) for key in "AB"
    ]
    a, b = (now[f"layers.0.up.lora_{key}.weight"] for key in "AB")
    assert (a.shape, b.shape, np.abs(b).max()) == ((2, 12), (32, 2), 0)
    assert 0.1 < np.abs(a).max() <= 1 / 12**0.5


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        files = load_file(folder / "adapter_model.safetensors")
        change(files)
        save_file(files, folder / "adapter_model.safetensors")

    return changed


UP = "base_model.model.layers.0.up"
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (_config(use_dora=True), "'use_dora' is set: DoRA scales the columns of the sum of both weights\n"),
    (_tensors(lambda one: one.update({"layers.1.down.weight": np.ones((64, 14), F)})), "has 'layers.1.down.weight'\n"),
    (_config(bias="all"), "'bias' is 'all': biases of the model are trained besides\n"),
    (_config(peft_type="IA3"), "'peft_type' is 'IA3'\n"),
    (_config(lora_alpha="8"), "'lora_alpha' and the values of 'alpha_pattern' are not all numbers"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json\n"),
    (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "it has adapter_model.bin\n"),
    (_tensors(lambda one: one.pop(f"{UP}.lora_B.weight")), "'layers.0.up' has no lora_B.weight\n"),
    (_tensors(lambda one: one.update({f"{UP}.lora_magnitude_vector": np.ones(3, F)})), "has 'base_model.model.layers.0.up.lora_mag"),
    (_tensors(lambda one: one.update({f"{UP}.lora_A.weight": np.ones((4, 12), np.int32)})), "'layers.0.up' is int32\n"),
    (_tensors(lambda one: one.update({f"{UP}.lora_A.weight": np.ones((3, 12), F)})), "has lora_A [3, 12] and lora_B [32, 4]\n"),
    (_tensors(lambda one: one.update({f"{UP}.lora_A.weight": np.ones((4, 13), F)})), "adds [13, 32] to 'layers.0.up', which is [12, 32]\n"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), BROKEN)
def test_another_form_is_one_error(tmp_path: Path, change: Callable[[Path], object], told: str) -> None:
    adapter(tmp_path / "sql", {"layers.0.up": 4})
    change(tmp_path / "sql")
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path, "ranks: 1\nadapters: {sql: sql}\n")
    assert told in str(caught.value)


PLANS = [
    ("{sql: {source: sql, rank: 2}}", "", "plan.yaml:2: adapter 'sql': 'rank' beside 'source'"),
    ("{sql: {rank: 2}}", "", "plan.yaml:2: adapter 'sql': neither 'source' nor 'on'"),
    ('{new: {on: "**"}}', "", "plan.yaml:2: adapter 'new': a new adapter, and no 'train'"),
    ("{a: sql, b: sql}", "", "plan.yaml:2: 2 adapters, and no 'generate'\n  one adapter is added to a model"),
    ("{a: {source: sql, train: true}}", "", "'a' has train: true, and the plan has no 'train'"),
    ("{a: sql}", TRAIN, "'train' beside the adapter 'a', which it does not change"),
    ('{new: {on: "layers.0.upp", train: true}}', TRAIN, "'layers.0.upp' matches no module or node of the model"),
    ('{new: {on: "**.Relu", train: true}}', TRAIN, "'**.Relu' matches no product with a constant weight"),
    ("{other: other}", "", "'other' adds to 'layers.7.up', which the model does not have"),
]


@pytest.mark.parametrize(("entry", "rest", "told"), PLANS)
def test_a_plan_that_has_no_such_adapter(tmp_path: Path, entry: str, rest: str, told: str) -> None:
    adapter(tmp_path / "sql", {"layers.0.up": 4})
    adapter(tmp_path / "other", {"layers.7.up": 4})
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path, f"ranks: 1\nadapters: {entry}\n{rest}")
    assert told in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_with_an_adapter_of_peft(tmp_path: Path) -> None:
    """Logits of GPT-2, whose layers are Conv1D, on two tensor parallel ranks; and an adapter of 5 steps of training."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers", "5.0")
    peft = pytest.importorskip("peft", reason="compares with peft: pip install peft")
    from partc.compiler.frontend import load

    torch.manual_seed(0)
    sizes: Any = {
        "vocab_size": 40,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    whole = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    whole.save_pretrained(tmp_path / "gpt2")
    options = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    net = peft.get_peft_model(whole, options)
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    net.save_pretrained(tmp_path / "sql")
    ids, labels = torch.randint(0, 40, (5, 4, 7)), torch.randint(0, 40, (5, 4, 7))
    with torch.no_grad():
        want = net(input_ids=ids[0]).logits.numpy()
    source = load(tmp_path / "gpt2")
    layout = (
        'ranks: 2\nmesh: {tp: 2}\nsharding: {"**.{c_attn,c_fc}": colwise, "**.c_proj": rowwise, lm_head: colwise}\n'
    )
    compile_source(
        source, parse_plan(f"{layout}adapters: {{sql: sql}}\n", str(tmp_path / "plan.yaml")), tmp_path / "build"
    )
    with load_local(tmp_path / "build") as ranks:
        np.testing.assert_allclose(ranks({"input_ids": ids[0].numpy()})["logits"], want, atol=1e-5)
    optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], lr=0.5)
    train = """train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: label}
  optimizer: {type: sgd, lr: 0.5}
  batch: 4
"""
    plan = parse_plan(f"{layout}adapters: {{sql: {{source: sql, train: true}}}}\n{train}", str(tmp_path / "plan.yaml"))
    compile_source(source, plan, tmp_path / "build")
    with load_local(tmp_path / "build") as ranks:
        for k in range(5):
            out = net(input_ids=ids[k]).logits
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(out.reshape(-1, 40), labels[k].reshape(-1)).backward()
            optimizer.step()
            ranks({"input_ids": ids[k].numpy(), "label": labels[k].numpy(), **fed(ranks, k + 1)})
        now = tensors(ranks)
    for name, weight in peft.get_peft_model_state_dict(net).items():
        np.testing.assert_allclose(now[name.removeprefix("base_model.model.")], weight, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore")
def test_the_wrapper_of_peft_is_taken_off_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model within, with its adapters, is compiled; a wrapper that computes by itself is refused by its kind."""
    torch = pytest.importorskip("torch")
    from partc.compiler.frontend import load

    class PeftModel(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, kind: str = "") -> None:
            super().__init__()
            self.base_model = torch.nn.Linear(3, 2)
            self.active_peft_config = SimpleNamespace(
                is_prompt_learning=bool(kind), peft_type=SimpleNamespace(value=kind)
            )

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        def get_base_model(self) -> Any:
            return self.base_model

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))
    text = 'import peft\nmodel=peft.PeftModel({})\nfrom partc.compiler import Input\ninputs = {{"input": Input(["batch", 3], "float32")}}\n'
    (tmp_path / "model.py").write_text(text.format(""))
    assert sorted(load(tmp_path / "model.py").model.graph.initializers) == ["bias", "weight"]
    (tmp_path / "model.py").write_text(text.format("'PREFIX_TUNING'"))
    with pytest.raises(CompileError, match="PeftModel puts learned tokens of PREFIX_TUNING before its inputs"):
        load(tmp_path / "model.py")
