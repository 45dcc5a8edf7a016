"""The forms in which exporters write a decoder with its cache: tokens are those of the file itself with a past that grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper
from partc.cli.commands.plan import command as plan_command
from partc.cli.main import invoke
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.exported import write_declared
from partc.compiler.ir.declared import Declared, Decoding
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import analyse
from partc.runtime import Request, load_local_generator
from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.artifact.manifest import open_artifact
from rows import of_today

WORDS, HEADS, KV, SIZE, WIDTH = 14, 4, 2, 16, 10
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6], [2, 6, 4, 3])
COUNT, LENGTH, CHUNK = 8, 20, 4
APPENDED = """
  present_k = Concat <axis = -2> (past_k, k)
  present_v = Concat <axis = 2> (past_v, v)
"""
MASK = """
  entries = Range (zero, all, one)
  steps = Range (zero, new, one)
  numbers = Add (steps, old)
  row = Unsqueeze (entries, axes_012)
  column = Unsqueeze (numbers, axes_013)
  mask = LessOrEqual (row, column)
"""
ATTENTION = MASK + APPENDED + "  mixed = Attention (q, present_k, present_v, mask)"
DECOMPOSED = (
    MASK
    + APPENDED
    + """
  sizes = Shape (present_k)
  two = Slice (sizes, begin, axes_2)
  length = Slice (sizes, axes_2, axes_3)
  merged_to = Concat <axis = 0> (rest, length, size)
  merged = Reshape (present_k, merged_to)
  turned = Transpose <perm = [0, 2, 1]> (merged)
  apart_to = Concat <axis = 0> (two, size, length)
  keys = Reshape (turned, apart_to)
  q_grouped_to = Concat <axis = 0> (two, q_group, tokens_1, size)
  q_grouped = Reshape (q, q_grouped_to)
  keys_grouped = Unsqueeze (keys, axes_2)
  scores = MatMul (q_grouped, keys_grouped)
  mask_grouped = Unsqueeze (mask, axes_2)
  seen = Where (mask_grouped, scores, never)
  shares = Softmax <axis = -1> (seen)
  values = Unsqueeze (present_v, axes_2)
  mixed_grouped = MatMul (shares, values)
  mixed_to = Concat <axis = 0> (two_first, rest, tokens_1, size)
  mixed = Reshape (mixed_grouped, mixed_to)
"""
)
"""Heads are merged with the batch while keys are transposed, as torch writes attention before opset 23."""


def decoder(attention: str, inputs: str = "", opset: int = 23, batch: str = "batch") -> onnx.ModelProto:
    """One layer: `attention` makes `mixed`, `present_k` and `present_v` of `q`, `k`, `v` and the past."""
    text = f"""<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
decoder (int64[{batch}, tokens] ids, {inputs} float[{batch}, {KV}, past, {SIZE}] past_k, float[{batch}, {KV}, past, {SIZE}] past_v)
  => (float[{batch}, tokens, {WORDS}] logits, float[{batch}, {KV}, total, {SIZE}] present_k, float[{batch}, {KV}, total, {SIZE}] present_v)
{{
  tokens_1 = Shape <start = 1, end = 2> (ids)
  new = Squeeze (tokens_1)
  past_1 = Shape <start = 2, end = 3> (past_k)
  old = Squeeze (past_1)
  all = Add (old, new)
  h = Gather (table, ids)
  q_flat = MatMul (h, wq)
  k_flat = MatMul (h, wk)
  v_flat = MatMul (h, wv)
  q_parted = Reshape (q_flat, parted)
  k_parted = Reshape (k_flat, parted)
  v_parted = Reshape (v_flat, parted)
  q = Transpose <perm = [0, 2, 1, 3]> (q_parted)
  k = Transpose <perm = [0, 2, 1, 3]> (k_parted)
  v = Transpose <perm = [0, 2, 1, 3]> (v_parted)
{attention}
  back = Transpose <perm = [0, 2, 1, 3]> (mixed)
  joined = Reshape (back, whole)
  out = MatMul (joined, wo)
  sum = Add (h, out)
  logits = MatMul (sum, head)
}}"""
    proto = onnx.parser.parse_model(text)
    for k, node in enumerate(proto.graph.node):
        node.name = f"layer.{node.output[0]}" if node.output[0] else f"n{k}"
    rng = np.random.default_rng(5)
    shapes = {"table": (WORDS, WIDTH), "wq": (WIDTH, HEADS * SIZE), "wk": (WIDTH, KV * SIZE), "wv": (WIDTH, KV * SIZE)}
    shapes |= {"wo": (HEADS * SIZE, WIDTH), "head": (WIDTH, WORDS)}
    weights = {name: rng.normal(0, 0.8, shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {
        "parted": np.array([0, 0, -1, SIZE]),
        "whole": np.array([0, 0, -1]),
        "zero": np.array(0),
        "one": np.array(1),
    }
    angles = np.arange(LENGTH + CHUNK)[:, None] * 0.1 ** np.arange(SIZE // 2)[None]
    weights |= {
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "one_axis": np.array([1]),
    }
    weights |= {"begin": np.array([0]), "axes_2": np.array([2]), "axes_3": np.array([3]), "size": np.array([SIZE])}
    weights |= {"rest": np.array([-1]), "q_group": np.array([HEADS // KV]), "never": np.array(-1e9, np.float32)}
    weights |= {"as_column": np.array([1, 1, -1, 1]), "two_first": np.array([0])}
    weights |= {"axes_02": np.array([0, 2]), "axes_4": np.array([4]), "two_of_each": np.array([1, 1, 1, 1, 2])}
    weights |= {"interleaved_to": np.array([1, 1, -1, SIZE]), "flat_to": np.array([-1, SIZE])}
    weights |= {"frequencies": (0.5 ** np.arange(SIZE // 2)).astype(np.float32)}
    weights |= {"axes_012": np.array([0, 1, 2]), "axes_013": np.array([0, 1, 3]), "axes_13": np.array([1, 3])}
    slopes = (0.5 ** np.arange(1, HEADS + 1)).astype(ml_dtypes.bfloat16).reshape(1, HEADS, 1, 1)
    weights |= {"slopes": slopes} if "slopes" in attention else {}
    weights |= {"half_size": np.array([SIZE // 2]), "far_end": np.array([1 << 40]), "last_axis": np.array([-1])}
    weights |= {"power": np.array(2, np.float32), "epsilon": np.array(0.5, np.float32)}
    weights |= {"norm_scale": rng.normal(1, 0.3, SIZE).astype(np.float32)}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto


def reference(proto: onnx.ModelProto) -> list[list[int]]:
    """The likeliest tokens of the file itself, token by token, with a past that grows."""
    model = onnx.ModelProto.FromString(proto.SerializeToString())
    compute_in_float32(model, bfloat16=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names, found = {port.name for port in session.get_inputs()}, []
    for prompt in PROMPTS:
        past, made, given = [np.zeros((1, KV, 0, SIZE), np.float32)] * 2, list[int](), [*prompt]
        for _ in range(COUNT):
            before = past[0].shape[2]
            fed = {
                "ids": np.array([given]),
                "past_k": past[0],
                "past_v": past[1],
                "position_ids": np.arange(before, before + len(given))[None],
                "attention_mask": np.ones((1, before + len(given)), np.int64),
            }
            logits, *past = session.run(None, {name: fed[name] for name in fed if name in names})
            made.append(int(logits[0, -1].argmax()))
            given = made[-1:]
        found.append(made)
    return found


def compiled(proto: onnx.ModelProto, folder: Path, plan: str) -> Complete:
    onnx.save(proto, folder / "decoder.onnx")
    (folder / "plan.yaml").write_text(plan)
    return compile_model(folder / "decoder.onnx", folder / "plan.yaml", folder / "build").program


def generated(proto: onnx.ModelProto, folder: Path, plan: str) -> list[list[int]]:
    compiled(proto, folder, plan)
    return tokens_of(folder)


def tokens_of(folder: Path) -> list[list[int]]:
    with load_local_generator(folder / "build", threads=1) as generator:
        return [one.tokens for one in generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])]


def of_slots(slots: int) -> str:
    return f"ranks: 1\ngenerate: {{slots: {slots}, length: {LENGTH}, chunk: {CHUNK}}}\n"


ROTATED = (
    MASK
    + """
  rows = Unsqueeze (numbers, begin)
  q_turned = RotaryEmbedding (q, cos, sin, rows)
  k_turned = RotaryEmbedding (k, cos, sin, rows)
  present_k = Concat <axis = 2> (past_k, k_turned)
  present_v = Concat <axis = 2> (past_v, v)
  mixed = Attention (q_turned, present_k, present_v, mask)
"""
)
PLAIN = (
    MASK
    + """
  squares = Pow (q, power)
  mean = ReduceMean (squares, {axes})
  shifted = Add (mean, epsilon)
  root = Sqrt (shifted)
  inverse = Reciprocal (root)
  unscaled = Mul (q, inverse)
  normal = Mul (norm_scale, unscaled)
  of_batch = Unsqueeze (position_ids, axes_2)
  of_tokens = Cast <to = 1> (of_batch)
  turns = Mul (of_tokens, frequencies)
  others = Mul (turns, power)
  angles = Concat <axis = -1> (turns, {turns})
  cosines_of_tokens = Cos (angles)
  sines_of_tokens = Sin (angles)
  cosines = Unsqueeze (cosines_of_tokens, one_axis)
  sines = Unsqueeze (sines_of_tokens, one_axis)
"""
    + "".join(
        f"""
  {word}_first = Slice ({source}, begin, half_size, axes_3)
  {word}_second = Slice ({source}, half_size, far_end, axes_3)
  {word}_negative = Neg ({word}_second)
  {word}_swapped = Concat <axis = -1> ({{swapped_{word}}})
  {word}_plain = Mul ({source}, cosines)
  {word}_across = Mul ({word}_swapped, sines)
  {word}_turned = Add ({word}_plain, {word}_across)
"""
        for word, source in (("q", "normal"), ("k", "k"))
    )
    + """
  present_k = Concat <axis = 2> (past_k, k_turned)
  present_v = Concat <axis = 2> (past_v, v)
  mixed = Attention (q_turned, present_k, present_v, mask)
"""
)
"""A norm and a rotation as torch writes them."""
PAST = "  mixed, present_k, present_v = Attention {attributes} (q, k, v, {mask}, past_k, past_v)"
FLAT_PAST = """
  flat, present_k, present_v = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2> (q_flat, k_flat, v_flat, , past_k, past_v)
  by_head = Reshape (flat, parted)
  mixed = Transpose <perm = [0, 2, 1, 3]> (by_head)
"""
GROUPED = """
  seen = ReduceSum (attention_mask, one_axis)
  last = Sub (seen, one)
  seqlens = Cast <to = 6> (last)
  total_1 = Shape <start = 1, end = 2> (attention_mask)
  total_0 = Squeeze (total_1)
  total_length = Cast <to = 6> (total_0)
  flat, present_k, present_v = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2 {attributes}>
    (q_flat, k_flat, v_flat, past_k, past_v, seqlens, total_length {rotary})
  by_head = Reshape (flat, parted)
  mixed = Transpose <perm = [0, 2, 1, 3]> (by_head)
"""
MASK_INPUT = "int64[batch, entries_of_mask] attention_mask,"
INTERLEAVED = (
    MASK
    + """
  of_batch = Unsqueeze (numbers, axes_02)
  of_tokens = Cast <to = 1> (of_batch)
  angles = Mul (of_tokens, frequencies)
  angles_twice = Concat <axis = -1> (angles, angles)
  waves_twice = Cos (angles_twice)
  waves, spare = Split <axis = -1, num_outputs = 2> (waves_twice)
  of_heads = Unsqueeze (waves, one_axis)
  pairs = Unsqueeze (of_heads, axes_4)
  twice = Expand (pairs, two_of_each)
  interleaved = Reshape (twice, {shape})
  q_turned = Mul (q, interleaved)
  k_turned = Mul (k, interleaved)
  present_k = Concat <axis = 2> (past_k, k_turned)
  present_v = Concat <axis = 2> (past_v, v)
  mixed = Attention (q_turned, present_k, present_v, mask)
"""
)
"""An angle for each pair of elements, as GLM, Cohere and Helium have them, where the exporter has fixed the batch of positions at 1."""
ALIBI = (
    MASK
    + APPENDED
    + """
  distances = Cast <to = 16> (row)
  low = Mul (slopes, distances)
  bias = Cast <to = 1> (low)
  biased = Where (mask, bias, never)
  mixed = Attention (q, present_k, present_v, biased)
"""
)
"""Biases of distances in bfloat16, as Falcon has them: onnxruntime has no kernel for their product."""
FORMS = {
    "positions repeated for a batch": decoder(
        ROTATED.replace(
            "rows = Unsqueeze (numbers, begin)",
            """batch_1 = Shape <start = 0, end = 1> (ids)
  repeated_to = Concat <axis = 0> (batch_1, one_axis)
  rows = Expand (numbers, repeated_to)""",
        )
    ),
    "interleaved positions": decoder(INTERLEAVED.format(shape="interleaved_to")),
    "appended by Concat": decoder(ATTENTION),
    "positions by Reshape": decoder(ATTENTION.replace("Unsqueeze (numbers, axes_013)", "Reshape (numbers, as_column)")),
    "alibi in bfloat16": decoder(ALIBI),
    "attention of single ops": decoder(DECOMPOSED, opset=18),
    "Attention with a past": decoder(MASK + PAST.format(attributes="", mask="mask")),
    "causal Attention with a past": decoder(PAST.format(attributes="<is_causal = 1, scale = 0.3>", mask="")),
    "causal Attention of flat heads": decoder(FLAT_PAST),
    "GroupQueryAttention": decoder(GROUPED.format(attributes=", scale = 0.4", rotary=""), MASK_INPUT, opset=21),
    "GroupQueryAttention with a window": decoder(
        GROUPED.format(attributes=", local_window_size = 3, softcap = 2.0", rotary=""), MASK_INPUT, opset=21
    ),
    "GroupQueryAttention of one product": decoder(
        "  packed = Concat <axis = 2> (q_flat, k_flat, v_flat)"
        + GROUPED.format(attributes="", rotary="").replace("(q_flat, k_flat, v_flat,", "(packed, , ,"),
        MASK_INPUT,
        opset=21,
    ),
    "GroupQueryAttention that rotates": decoder(
        GROUPED.format(attributes=", do_rotary = 1", rotary=", cos, sin"), MASK_INPUT, opset=21
    ),
}


@pytest.mark.parametrize(
    ("form", "slots"), of_today([*((form, 3) for form in FORMS), *((form, 1) for form in [*FORMS][::3])], 4)
)
def test_tokens_are_those_of_the_file(form: str, slots: int, tmp_path: Path) -> None:
    """Two ranks make them in `test_no_rank_sends_a_cache`."""
    expected = reference(FORMS[form])
    assert len({*map(tuple, expected)}) > 1
    assert generated(FORMS[form], tmp_path, of_slots(slots)) == expected


def test_a_mask_reads_the_size_of_what_a_table_gives(tmp_path: Path) -> None:
    """As Git's; the table is in a file next to the model."""
    proto = decoder(ATTENTION.replace("(zero, new, one)", "(zero, of_table, one)", 1))
    for text in ("of_table = Squeeze (size_of_table)", "size_of_table = Shape <start = 1, end = 2> (h)"):
        place = [node.output[0] for node in proto.graph.node].index("h") + 1
        proto.graph.node.insert(place, onnx.parser.parse_node(text))
    expected = reference(proto)
    onnx.save(proto, tmp_path / "decoder.onnx", save_as_external_data=True, size_threshold=0)
    (tmp_path / "plan.yaml").write_text(of_slots(2))
    compile_model(tmp_path / "decoder.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    with load_local_generator(tmp_path / "build", threads=1) as generator:
        made = generator.run([Request(prompt, max_tokens=COUNT) for prompt in PROMPTS])
    assert [one.tokens for one in made] == expected


def test_a_symbol_is_the_last_dim_of_a_past(tmp_path: Path) -> None:
    """So that a file is for caches of any element type; the size of a head is that of the product."""
    form = FORMS["GroupQueryAttention of one product"]
    proto = onnx.ModelProto()
    proto.CopyFrom(form)
    for port in (*proto.graph.input, *proto.graph.output):
        if port.name.startswith(("past", "present")):
            port.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    assert generated(proto, tmp_path, of_slots(3)) == reference(form)


@pytest.mark.parametrize("degrees", ["--tp 2", *of_today(["--dp 2", ""], 1)])
def test_a_proposed_plan_generates(degrees: str, tmp_path: Path) -> None:
    proto = decoder(ATTENTION)
    onnx.save(proto, tmp_path / "decoder.onnx")
    given = [str(tmp_path / "decoder.onnx"), *degrees.split(), "--generate", str(LENGTH), "--slots", "2"]
    made = CliRunner().invoke(plan_command, given)
    assert made.exit_code == 0, made.output
    assert generated(proto, tmp_path, made.stdout) == reference(proto)
    assert ("colwise" in made.stdout) == ("tp" in degrees)
    assert "past_k:" not in made.stdout


@pytest.mark.parametrize("form", of_today([form for form in FORMS if "one product" not in form], 5))
def test_no_rank_sends_a_cache(form: str, tmp_path: Path) -> None:
    plan = "ranks: 2\nmesh: {tp: 2}\nsharding: {layer.q_flat: colwise, layer.k_flat: colwise, layer.v_flat: colwise, layer.out: rowwise}\n"
    generate = f"generate: {{slots: 3, length: {LENGTH}, chunk: {CHUNK}}}\n"
    assert [event.op_type for event in compiled(FORMS[form], tmp_path, plan + generate).events] == ["AllReduce"]
    expected = reference(FORMS[form])
    assert len({*map(tuple, expected)}) > 1
    assert tokens_of(tmp_path) == expected


KEYS_OVER = f"ranks: N\nsharding: {{'layer.[qkv]_flat': colwise, layer.out: rowwise}}\n{of_slots(3)[9:]}"


@pytest.mark.parametrize("form", of_today(["appended by Concat", "causal Attention of flat heads", "rotated"], 1))
def test_two_heads_of_keys_over_four_ranks_are_on_two_each(form: str, tmp_path: Path) -> None:
    proto = decoder(ROTATED) if form == "rotated" else FORMS[form]
    program = compiled(proto, tmp_path, KEYS_OVER.replace("N", "4"))
    assert [event.op_type for event in program.events] == ["AllReduce"]
    assert tokens_of(tmp_path) == reference(proto)
    caches = [one for one in open_artifact(tmp_path / "build").model(1).graph.input if one.name.startswith("past_")]
    kept = [[dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in caches]
    assert kept == [[3, 1, LENGTH + CHUNK - 1, SIZE]] * 2


def test_heads_of_keys_that_ranks_neither_divide_nor_are_a_multiple_of(tmp_path: Path) -> None:
    onnx.save(decoder(ATTENTION), tmp_path / "decoder.onnx")
    (tmp_path / "plan.yaml").write_text(KEYS_OVER.replace("N", "3"))
    with pytest.raises(CompileError, match=r"(?s)'layer.k_flat' makes 2 heads of keys.*over 3 ranks.*use 2, 4 ranks"):
        analyse(tmp_path / "decoder.onnx", tmp_path / "plan.yaml")


@pytest.mark.parametrize("given", [["--slots", "2"], ["--generate", "20", "--plan", "other.yaml", "--target", "auto"]])
def test_options_of_a_proposal_that_do_not_fit(given: list[str], tmp_path: Path) -> None:
    onnx.save(decoder(ATTENTION), tmp_path / "decoder.onnx")
    result = CliRunner().invoke(plan_command, [str(tmp_path / "decoder.onnx"), *given])
    assert result.exit_code != 0
    assert "help:" in str(result.exception)


IF = """
  is_first = Equal (old, zero)
  mixed, present_k, present_v = If (is_first) <
    then_branch = first () => (float[b, h, s, d] a, float[b, g, n, d] c, float[b, g, n, d] e)
      { a = Identity (q) c = Identity (k) e = Identity (v) },
    else_branch = later () => (float[b, h, s, d] f, float[b, g, n, d] i, float[b, g, n, d] j)
      { f = Identity (q) i = Concat <axis = 2> (past_k, k) j = Concat <axis = 2> (past_v, v) }
  >
"""
OTHER = """
  other = ReduceSum <keepdims = 0> ({})
  mixed = Add (own, other)
"""
LATER = "a token sees later ones"
UNMASKED, OWN = ATTENTION.replace(", mask)", ")"), ATTENTION.replace("mixed =", "own =")


def of_single_ops(seen: str) -> onnx.ModelProto:
    return decoder(DECOMPOSED.replace("Where (mask_grouped, scores, never)", seen), opset=18)


REFUSED = {
    "an If": (decoder(IF), 1, "has its caches in the If 'layer."),
    "no cache": (
        decoder(ATTENTION.replace("(past_k, k)", "(k, k)").replace("(past_v, v)", "(v, v)")),
        1,
        "the model has no cache",
    ),
    "another reader": (decoder(OWN + OTHER.format("past_k")), 1, "'past_k' is also read by ReduceSum"),
    "a fixed batch": (decoder(ATTENTION, batch="2"), 1, "export the model with a dynamic batch"),
    "two entries for a token": (
        decoder(
            ATTENTION.replace("(past_v, v)", "(past_v, v_v)").replace(
                "  present_v", "  v_v = Concat <axis = 2> (v, v)\n  present_v"
            )
        ),
        1,
        "Concat 'layer.present_v' appends 2 entries for each token to 'past_v'",
    ),
    "an input that no step is given": (
        decoder(OWN + "  mixed = Add (own, extra)", f"float[batch, {HEADS}, tokens, {SIZE}] extra,"),
        1,
        "no step is given 'extra', which the decoder reads",
    ),
    "no mask": (decoder(UNMASKED), 1, "in Attention 'layer.mixed' " + LATER),
    "no mask of single ops": (of_single_ops("Identity (scores)"), 3, "in Softmax 'layer.shares' " + LATER),
    "a mask that hides what is before": (of_single_ops("Where (mask_grouped, never, scores)"), 3, LATER),
    "a mask of what is later": (
        decoder(ATTENTION.replace("LessOrEqual", "GreaterOrEqual")),
        3,
        "'layer.mixed' " + LATER,
    ),
    "positions that the batch is merged with": (
        decoder(INTERLEAVED.format(shape="flat_to")),
        3,
        "export the model with an input 'position_ids'",
    ),
    "scores": (
        decoder(
            PAST.format(attributes="", mask="").replace(
                "mixed, present_k, present_v =", "own, present_k, present_v, qk ="
            )
            + OTHER.format("qk")
        ),
        1,
        "has its scores as an output",
    ),
    "smooth": (decoder(GROUPED.format(attributes=", smooth_softmax = 1", rotary=""), MASK_INPUT), 1, "smooth_softmax"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_generate_is_refused(form: str, tmp_path: Path) -> None:
    proto, slots, text = REFUSED[form]
    onnx.save(proto, tmp_path / "decoder.onnx")
    (tmp_path / "plan.yaml").write_text(of_slots(slots))
    with pytest.raises(CompileError) as raised:
        compile_model(tmp_path / "decoder.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert text in str(raised.value)


def test_positions_that_change_with_the_length_bound_it(tmp_path: Path) -> None:
    onnx.save(decoder(ATTENTION), tmp_path / "decoder.onnx")
    model = load(tmp_path / "decoder.onnx").model
    write_declared(model, Declared(decoding=Decoding(longest=16, positions="longrope")), None)
    ir.save(model, tmp_path / "decoder.onnx")
    (tmp_path / "plan.yaml").write_text(of_slots(3))
    with pytest.raises(CompileError, match=r"(?s)beyond 16 tokens .* longrope positions change.*write length: 16"):
        analyse(tmp_path / "decoder.onnx", tmp_path / "plan.yaml")


def test_a_compile_says_where_a_mask_is_not_causal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.yaml").write_text(of_slots(3))
    of_tokens = "  i = Unsqueeze (ids, axes_13)\n  odd = Less (i, axes_3)\n  mask = And (before, odd)\n"
    masked = ATTENTION.replace("mask = Less", "before = Less").replace("\n  present_k", f"\n{of_tokens}  present_k")
    forms = (
        (FORMS["GroupQueryAttention with a window"], True),
        (FORMS["Attention with a past"], False),
        (decoder(masked), True),
    )
    for form, unfused in forms:
        onnx.save(form, tmp_path / "decoder.onnx")
        options = ["--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "build")]
        assert invoke(["compile", str(tmp_path / "decoder.onnx"), *options]) == 0
        assert (
            ", whose mask is not causal or not proven so, reads the entries of all slots" in capsys.readouterr().out
        ) == unfused


GROWTH = """
import sys
from partc.runtime import load_local_generator
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
with load_local_generator(sys.argv[1], threads=1) as generator:
    tokens = generator.stream([1] * 1500, max_tokens=120)
    for _ in range(20):
        next(tokens)
    before = resident()
    for _ in range(100):
        next(tokens)
    print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_each_token(tmp_path: Path) -> None:
    """A step copies 1,500 entries of 256 bytes of keys and as many of values: 100 steps would add 75 MB."""
    onnx.save(decoder(ATTENTION), tmp_path / "decoder.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 2, length: 1700, chunk: 8}\n")
    compile_model(tmp_path / "decoder.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path / "build")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000_000


def test_heads_are_rotated_and_attended_as_the_products_make_them(tmp_path: Path) -> None:
    proto = decoder(ROTATED)
    assert generated(proto, tmp_path, of_slots(3)) == reference(proto)
    for program in ("decode", "prefill"):
        kinds = [node.op_type for node in open_artifact(tmp_path / "build", program=program).model(0).graph.node]
        assert kinds.count("RotaryEmbedding") == 2
        assert kinds.count("GroupQueryAttention") == 1
        assert "Transpose" not in kinds
        assert "Reshape" not in kinds


@pytest.mark.parametrize(
    ("axes", "turns", "swapped", "counts"),
    [
        ("last_axis", "turns", ("negative", "first"), (1, 2)),
        ("axes_13", "turns", ("negative", "first"), (0, 2)),  # of heads, too
        ("last_axis", "others", ("negative", "first"), (1, 0)),
        ("last_axis", "turns", ("first", "negative"), (1, 0)),
    ],
)
def test_plain_ops_become_the_standards_where_they_are_the_same(
    axes: str, turns: str, swapped: tuple[str, str], counts: tuple[int, int], tmp_path: Path
) -> None:
    halves = {f"swapped_{word}": ", ".join(f"{word}_{half}" for half in swapped) for word in "qk"}
    proto = decoder(PLAIN.format(axes=axes, turns=turns, **halves), "int64[batch, tokens] position_ids,")
    assert generated(proto, tmp_path, of_slots(3)) == reference(proto)
    kinds = [node.op_type for node in open_artifact(tmp_path / "build").model(0).graph.node]
    assert (kinds.count("RMSNormalization"), kinds.count("RotaryEmbedding")) == counts
    assert ("Neg" in kinds, "ReduceMean" in kinds) == (counts[1] == 0, counts[0] == 0)
