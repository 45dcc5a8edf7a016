"""A decoder whose states each token replaces, as of a state space or of linear attention, makes the tokens that it makes alone.

The model has a state of a convolution and a recurrent one by layer, and takes one token: ids [batch, 1], past_conv.0, past_scan.0, ..
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_layouts import STAGES
from decoders import Build
from mutated import rewrite_raw, texts
from onnx import TensorProto, helper
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, Request, load_local_generator
from partc.runtime.artifact.format import Manifest
from partc.runtime.generation.request import Answer
from rows import of_today

VOCABULARY, WIDTH, CHANNELS, KERNEL, SIZE, LAYERS = 64, 16, 24, 3, 5, 2
STATES = {"conv": (CHANNELS, KERNEL), "scan": (CHANNELS, SIZE)}
TENSOR = 'sharding: {"layers.*.up": colwise, "layers.*.down": rowwise, head: colwise}\n'
LAYOUTS = {
    "one rank": ("ranks: 1\n", "slots: 3"),
    "tensor parallel": (f"ranks: 2\nmesh: {{tp: 2}}\n{TENSOR}", "slots: 2"),
    "stages": ("ranks: 2\n" + STAGES.format(first=0, second=1), "slots: 4, groups: 2"),
    "data parallel": ("ranks: 2\ndataset: data_parallel\n", "slots: 4"),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [*range(1, 24)], [11, 12], [60, 2, 33, 4], [3, 1, 4, 1, 5, 9, 2, 6, 7]]
COUNTS = [12, 20, 5, 9, 17, 3]


def model() -> onnx.ModelProto:
    build = Build()
    h = build.op("Gather", "embed.tokens", build.weight("embed.tokens.weight", VOCABULARY, WIDTH), "ids")
    begin, end, last = build.constant("begin", [1]), build.constant("end", [KERNEL + 1]), build.axes(2)
    for layer in range(LAYERS):
        path = f"layers.{layer}"
        up = build.op("Transpose", f"{path}.up.turned", build.linear(f"{path}.up", h, WIDTH, CHANNELS), perm=[0, 2, 1])
        joined = build.op("Concat", f"{path}.conv", f"past_conv.{layer}", up, axis=2)
        build.nodes.append(helper.make_node("Slice", [joined, begin, end, last], [f"present_conv.{layer}"]))
        kernel = build.op("Mul", f"{path}.conv", joined, build.weight(f"{path}.kernel", CHANNELS, KERNEL + 1))
        given = build.op("ReduceSum", f"{path}.conv", kernel, last)
        decay = build.op("Sigmoid", path, build.weight(f"{path}.decay", CHANNELS, SIZE))
        old, new = (
            build.op("Mul", f"{path}.scan", *operands)
            for operands in ((f"past_scan.{layer}", decay), (given, build.weight(f"{path}.into", CHANNELS, SIZE)))
        )
        build.nodes.append(helper.make_node("Add", [old, new], [f"present_scan.{layer}"], f"{path}.scan.Add"))
        out = build.op("Mul", f"{path}.out", f"present_scan.{layer}", build.weight(f"{path}.from", CHANNELS, SIZE))
        mixed = build.op("Tanh", path, build.op("ReduceSum", f"{path}.out", out, last, keepdims=0))
        mixed = build.op("Unsqueeze", f"{path}.out", mixed, build.axes(1))
        h = build.linear(f"{path}.down", mixed, CHANNELS, WIDTH)
    batch = build.op(
        "Shape", "batch", "past_conv.0", start=0, end=1
    )  # asked in the last stage of the state in the first
    sizes = build.op("Concat", "batch", batch, build.constant("row", [1, WIDTH]), axis=0)
    h = build.op("Reshape", "head.rows", h, sizes)
    build.nodes.append(
        helper.make_node("MatMul", [h, build.weight("head.weight", WIDTH, VOCABULARY)], ["logits"], "head.MatMul")
    )
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 1])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, VOCABULARY])]
    for layer in range(LAYERS):
        for kind, sizes in STATES.items():
            for side, values in (("past", inputs), ("present", outputs)):
                values.append(
                    helper.make_tensor_value_info(f"{side}_{kind}.{layer}", TensorProto.FLOAT, ["batch", *sizes])
                )
    graph = helper.make_graph(build.nodes, "states", inputs, outputs, build.weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """The tokens that the model makes of each prompt alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [f"{kind}.{layer}" for layer in range(LAYERS) for kind in STATES]
    found = []
    for prompt, count in zip(PROMPTS, COUNTS, strict=True):
        states = [np.zeros((1, *STATES[name.partition(".")[0]]), np.float32) for name in names]
        tokens, made = [*prompt], list[int]()
        while len(made) < count:
            feeds = {f"past_{name}": state for name, state in zip(names, states, strict=True)}
            logits, *states = session.run(None, {"ids": np.array([[tokens.pop(0)]]), **feeds})
            if not tokens:
                made.append(int(logits[0, 0].argmax()))
                tokens = made[-1:]
        found.append(made)
    return found


def compiled(folder: Path, layout: str, more: str = "") -> Manifest:
    plan, slots = LAYOUTS[layout]
    onnx.save(model(), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{plan}generate: {{{slots}, length: 64, chunk: 1{more}}}\n")
    return compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build").manifest


def with_idle_steps(generator: Generator) -> list[list[int]]:
    """The answers to all prompts, where after each step another one is run that has no token of any slot."""
    slots, answers = generator.slots(), [Answer() for _ in PROMPTS]
    for number, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True)):
        slots.admit(number, Request(prompt, max_tokens=count))
    groups = [*range(slots.record.groups)]
    while steps := [step for group in groups if (step := slots.next(group)) is not None]:
        for step in steps:
            position, count = step.position + step.count, np.zeros_like(step.count)
            for made in generator.begin(slots, step)():
                answers[made.request].add(made)
            idle = replace(step, tokens=step.tokens.copy(), position=position, count=count, taking={})
            assert not generator.begin(slots, idle)()
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("layout", of_today([*LAYOUTS], 1))
def test_slots_make_the_tokens_of_the_model_alone(layout: str, answers: list[list[int]], tmp_path: Path) -> None:
    manifest = compiled(tmp_path, layout)
    kept = {one.value: one.local_shape(one.ranks[0]) for one in manifest.state}
    assert manifest.generation is not None
    assert (
        {*manifest.generation.states}
        == {*kept}
        == {f"past_{kind}.{layer}" for layer in range(LAYERS) for kind in STATES}
    )
    channels = CHANNELS // 2 if layout == "tensor parallel" else CHANNELS
    assert {shape[1] for shape in kept.values()} == {channels}
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        assert with_idle_steps(generator) == answers
        batch, made = ContinuousBatch(generator), dict[int, list[int]]()
        batch.warm_up()
        for number in range(4):  # two leave in the middle of a prompt, and others take their slots
            batch.admit(number, Request(PROMPTS[2][::-1] if number < 2 else PROMPTS[number], max_tokens=COUNTS[number]))
        for _ in range(5):
            batch.step()
        for number in range(2):
            batch.cancel(number)
            batch.admit(4 + number, Request(PROMPTS[4 + number], max_tokens=COUNTS[4 + number]))
        while not batch.idle:
            for one in batch.step() or ():
                made.setdefault(one.request, []).append(one.token)
    # those of the first steps are not in it
    assert all(answers[number][len(answers[number]) - len(tokens) :] == tokens for number, tokens in made.items())
    assert {number: len(made[number]) for number in (4, 5)} == {4: COUNTS[4], 5: COUNTS[5]}


def test_a_plan_of_several_tokens_is_refused(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\ngenerate: {length: 64, chunk: 8}\n")
    with pytest.raises(CompileError, match="'chunk' is 8") as caught:
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert "states of fixed size, such as 'past_conv.0', which each token replaces" in str(caught.value)
    assert "write chunk: 1" in str(caught.value)


def test_verify_reads_prompts_by_tokens(tmp_path: Path) -> None:
    compiled(tmp_path, "one rank")
    assert invoke(["verify", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml"), "--random", "5"]) == 0


def test_states_that_the_manifest_does_not_name_are_found(tmp_path: Path) -> None:
    compiled(tmp_path, "one rank")
    build = tmp_path / "build"
    assert not texts(build)
    rewrite_raw(build, lambda index: index["generation"].update(states=index["generation"]["states"][1:]))
    assert "each token replaces 'past_conv.0', and the generation does not name it" in texts(build)


@pytest.mark.parametrize("layout", ["one rank", "stages"])
def test_an_embedding_of_a_prompt_that_is_read_a_token_a_step(layout: str, tmp_path: Path) -> None:
    whole = model()
    head = next(node for node in whole.graph.node if node.name == "head.MatMul")
    whole.graph.output.append(helper.make_tensor_value_info(head.input[0], TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(whole.SerializeToString())
    names = [f"{kind}.{layer}" for layer in range(LAYERS) for kind in STATES]
    compiled(tmp_path, layout, ", embeddings: mean")
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        found = generator.run([Request(prompt, embeds=True) for prompt in PROMPTS])
    for prompt, one in zip(PROMPTS, found, strict=True):
        states, total = [np.zeros((1, *STATES[name.partition(".")[0]]), np.float32) for name in names], np.zeros(WIDTH)
        for token in prompt:
            feeds = {f"past_{name}": state for name, state in zip(names, states, strict=True)}
            _, *states, hidden = session.run(None, {"ids": np.array([[token]]), **feeds})
            total += hidden[0, 0]
        assert one.embedding is not None
        np.testing.assert_allclose(one.embedding, total / np.linalg.norm(total), atol=2e-6)
