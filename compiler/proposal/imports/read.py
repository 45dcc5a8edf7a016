"""Identifies the system that wrote a file by the file's suffix or its keys.

MindSpore's strategy files, as `strategy_ckpt_config={"save_file": "strategy.json"}` writes them, one for each pipeline stage.

    {"current_stage": 0,
     "parallel_strategy_item": {"MatMul_layers.0.dense.weight": {"stage": 0, "parallel_strategy": [[2, 4], [4, 1]]}},
     "parallel_layout_item": {"layers.0.dense.weight": {"dev_matrix": [2, 4], "tensor_map": [0, -1], "tensor_shape": [64, 32], ...}}}

An operator's name is its kind and the parameter that it reads; its strategy has the number of shards of each dim of each input, as `in` of
a rule of `sharding` has. Layouts follow from strategies: of them the shapes are read, and the sharding of an optimizer.

A `parallelize_plan` of torch.distributed.tensor.parallel, as `parallelize_module` takes it, in a file of Python.

    parallelize_plan = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }

Keys are patterns of modules in torch as here. What a style says of a module's inputs and outputs is derived here, so only what shards
weights is taken. Styles are known by the names of their classes: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.

Megatron-LM's arguments: a command line or script with `--tensor-model-parallel-size 4`, or a YAML or JSON file with such keys.

Sizes become degrees of a proposal, options of the training become lines of `train:`, and options without a counterpart are listed. Options
of the network itself, such as `--num-layers`, belong to the model here: they are counted, not listed.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from partc.compiler.directives.recorder import recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.user_code import UserFile, errors_by_line, importable
from partc.compiler.ir.declared import TpPlanEntry
from partc.compiler.plan.document import parse_document, read_text
from partc.compiler.plan.sharding import MEANINGS
from partc.compiler.proposal.imports.imported import Imported, Strategy
from partc.runtime.files.regular import fault

NAMES = ("parallelize_plan", "tp_plan")
_LAYOUTS_ALONE = ("PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "NoParallel")


def read_torch_plan(file: Path) -> Imported:
    """The entries of the plan of this name that the file defines; words such as "colwise" stand for styles.

    CompileError where the file defines none, or one that does not map patterns to styles.
    """
    if why := fault(file):
        raise CompileError(
            Problem(str(file), "no such file" if not file.exists() else why, help="pass a file of Python")
        )
    file = file.resolve()
    with recording(file.parent) as recorder, importable(file.parent), errors_by_line(file, recorder):
        variables = UserFile.run(file).globals
    name = next((one for one in NAMES if one in variables), None)
    if name is None:
        fact = f"the file defines neither {' nor '.join(NAMES)}"
        raise CompileError(Problem(str(file), fact, help='write parallelize_plan = {"layers.*.up": ColwiseParallel()}'))
    plan = variables[name]
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        fact = f"{name} is {type(plan).__name__}, not a dict of modules' names and styles"
        raise CompileError(Problem(str(file), fact, help="give the dict that parallelize_module takes"))
    return of_styles(plan, file.name)


def of_styles(plan: Mapping[str, object], source: str) -> Imported:
    """The import of patterns with styles: torch's objects, or words of Hugging Face."""
    styles: list[TpPlanEntry] = []
    left: list[str] = []
    for pattern, style in plan.items():
        word = _word(style)
        if word:
            styles.append(TpPlanEntry(pattern, word, source))
        left += (f"{pattern}: {type(style).__name__}{text}" for text in _left(style))
    return Imported(source, styles=tuple(styles), ignored=tuple(left))


def _word(style: object) -> str:
    """The word of a style that shards weights; "" of one that speaks of values alone, or is not known."""
    if isinstance(style, str):
        return style
    match type(style).__name__:
        case "ColwiseParallel":
            outputs = getattr(style, "output_layouts", ()) or ()
            return "colwise_gather_output" if any(type(one).__name__ == "Replicate" for one in outputs) else "colwise"
        case "RowwiseParallel":
            return "rowwise"
    return ""


def _left(style: object) -> Iterator[str]:
    kind = type(style).__name__
    outputs = getattr(style, "output_layouts", ())
    scattered = [one.dim for one in outputs or () if type(one).__name__ == "Shard"] if kind == "RowwiseParallel" else []
    if scattered:
        yield (
            f", output sharded along dim {scattered[0]}: partc derives what leaves a module; "
            "`{style: rowwise, level: 1}` keeps it sharded for less memory"
        )
    elif kind == "SequenceParallel":
        yield ": a norm follows the layout of what it reads; `level: 1` of a rowwise rule before it shards it"
    elif not (isinstance(style, str) or kind in ("ColwiseParallel", "RowwiseParallel", *_LAYOUTS_ALONE)):
        yield f": partc has no such style; it has {', '.join(sorted(MEANINGS)[:4])} and others"


STRATEGIES, LAYOUTS = "parallel_strategy_item", "parallel_layout_item"


def read_mindspore(files: Sequence[tuple[str, Mapping[str, object]]], source: str) -> Imported:
    """The strategies of all files, by name and content. CompileError where an item is not as MindSpore writes it."""
    problems: list[Problem] = []
    strategies: dict[str, Strategy] = {}
    left: list[str] = []
    ranks = 0
    for file, content in files:
        layouts = _layouts(content, file, problems)
        shapes = {name: tuple(layout.get("tensor_shape") or ()) for name, layout in layouts.items()}
        ranks = max([ranks, *(math.prod(layout.get("dev_matrix") or ()) for layout in layouts.values())])
        if any((layout.get("opt_weight_shard_size") or 0) > 1 for layout in layouts.values()):
            left.append(
                "optimizer state in shards (opt_weight_shard_size): write `optimizer: {shard: true}` in `train:`"
            )
        items = content.get(STRATEGIES) or {}
        if not isinstance(items, dict):
            problems.append(Problem(file, f"{STRATEGIES} does not map operators to strategies", help=_LAW))
            continue
        for name, item in items.items():
            stage, inputs = _strategy(item)
            op, _, weight = name.partition("_")
            if inputs is None:
                problems.append(Problem(file, f"'{name}' has no stage and list of strategies", help=_LAW))
            else:
                strategies[name] = Strategy(op, weight, inputs, stage, shapes.get(weight, ()))
    if problems:
        raise CompileError(problems)
    degrees = {"ranks": ranks} if ranks > 1 else {}
    return Imported(source, degrees, strategies=tuple(strategies.values()), ignored=tuple(dict.fromkeys(left)))


_LAW = "pass the .json that `strategy_ckpt_config` has written"


def _strategy(item: object) -> tuple[int, tuple[tuple[int, ...], ...] | None]:
    """The stage of an item and its strategies; None for these where they are not lists of numbers of shards."""
    if not isinstance(item, dict) or not isinstance(stage := item.get("stage", 0), int) or stage < 0:
        return 0, None
    lists = item.get("parallel_strategy")
    if not isinstance(lists, list) or not all(map(_is_list_of_sizes, lists)):
        return 0, None
    return stage, tuple(map(tuple, cast("list[list[int]]", lists)))


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and one > 0 for one in value)


def _layouts(content: Mapping[str, object], file: str, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The layouts of a file by parameter, those that MindSpore could have written."""
    layouts = content.get(LAYOUTS) or {}
    if not isinstance(layouts, dict):
        problems.append(Problem(file, f"{LAYOUTS} does not map parameters to layouts", help=_LAW))
        return {}
    sizes = ("tensor_shape", "dev_matrix")
    sound = {}
    for name, layout in layouts.items():
        if isinstance(layout, dict) and all(_is_list_of_sizes(layout.get(key) or []) for key in sizes):
            sound[name] = layout
        else:
            problems.append(Problem(file, f"the layout of '{name}' has no lists of sizes", help=_LAW))
    return sound


_KINDS = (
    "a .py with a parallelize_plan of torch, a tp_plan of transformers (its config.json, or patterns with words), arguments of "
    "Megatron-LM (a script, YAML), or strategy files of MindSpore (.json, one for each stage)"
)


def read_imported(files: Sequence[Path]) -> Imported:
    """Reads files that are all of one system (only MindSpore has several). CompileError where the system is not known."""
    first, source = files[0], ", ".join(file.name for file in files)
    if len(files) == 1 and first.suffix == ".py":
        return read_torch_plan(first)
    contents = []
    for file in files:
        text = read_text(file)
        options = (f"--{name.replace('_', '-')}" for name in (TP, STAGES))
        if len(files) == 1 and any(option in text for option in options):
            return read_megatron(arguments(text, str(file)), source, str(file))
        data = parse_document(text, str(file)).data
        if not isinstance(data, dict):
            raise _unknown(file, "the file has no keys")
        contents.append((str(file), data))
    data = contents[0][1]
    if any(STRATEGIES in data or LAYOUTS in data for _, data in contents):
        return read_mindspore(contents, source)
    if len(files) > 1:
        raise _unknown(files[1], "several files are given, and they are not MindSpore's")
    named: dict[str, object] = {key.replace("-", "_"): value for key, value in data.items()}
    if TP in named or STAGES in named:
        return read_megatron(named, source, str(first))
    plan = next((data[key] for key in ("base_model_tp_plan", "tp_plan") if key in data), data)
    if isinstance(plan, dict) and plan and all(isinstance(style, str) for style in plan.values()):
        return of_styles(plan, source)
    raise _unknown(first, f"its keys are {', '.join(list(data)[:4])}")


def _unknown(file: Path, fact: str) -> CompileError:
    return CompileError(Problem(str(file), f"not a plan that partc can import: {fact}", help=f"pass {_KINDS}"))


TP, STAGES = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_OF_THE_MODEL = re.compile(
    r"num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|group_query_attention|kv_channels|seq_length|"
    r"max_position_embeddings|vocab_size|make_vocab_size_divisible_by|padded_vocab_size|position_embedding_type|rotary_base|"
    r"rotary_percent|swiglu|normalization|norm_epsilon|attention_dropout|hidden_dropout|untie_embeddings_and_output_weights|"
    r"disable_bias_linear|add_qkv_bias|init_method_std|attention_softmax_in_fp32|apply_layernorm_1p|tokenizer_type|"
    r"tokenizer_model|transformer_impl"
)
_WITHOUT_EFFECT = re.compile(
    r"use_mcore_models|no_gradient_accumulation_fusion|overlap_grad_reduce|overlap_param_gather|distributed_backend|"
    r"log_interval|use_flash_attn|no_async_tensor_model_parallel_allreduce|tensorboard_dir|nproc_per_node|nnodes|node_rank|"
    r"master_addr|master_port|rdzv_id|rdzv_backend|rdzv_endpoint|nproc|world_size"
)
_STORED = 'write `parameters: {"**": {stored: dp}}`'
_HINTS = {
    "context_parallel_size": "write `context: {axis: cp}`, with an axis of the mesh, or give --context",
    "expert_model_parallel_size": "add `--ep`, such as --ep 4: ranks of `--dp` share the experts",
    "moe_expert_capacity_factor": "write `experts: {axis: dp, capacity: 1.25}`, which drops the later tokens of a rank",
    "num_layers_per_virtual_pipeline_stage": "write more stages than ranks, with `schedule: interleaved`",
    "virtual_pipeline_model_parallel_size": "write more stages than ranks, with `schedule: interleaved`",
    "use_torch_fsdp2": _STORED,
    "use_megatron_fsdp": _STORED,
    "data_parallel_sharding_strategy": f"for optim_grads_params {_STORED}",
    "sequence_parallel": "`{style: rowwise, level: 1}` shards the sequence between layers for less memory",
    "recompute_granularity": 'write `recompute: ["layers.*"]` with the modules\' names in `pipeline`',
    "recompute_method": "`recompute` names modules",
    "recompute_num_layers": "`recompute` names modules",
    "data_path": "`data` of `train:` names files or a Python file",
    "split": "`data` and `test` of `train:` name files",
    "save": "pass the folder to `partc train --checkpoint`",
    "load": "pass `--resume auto` to `partc train`",
    "eval_iters": "an evaluation takes all of `test`",
}


def arguments(text: str, file: str) -> dict[str, str]:
    """Maps the options of a script or command line, with `_` in their names, to their last value; "" for one without a value.

    Lines that end in a backslash are joined with the next; comments are left out, as in the shell. Raises CompileError for an unclosed
    quote.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise CompileError(
            Problem(file, f"the script cannot be read: {error}", help="pass the arguments alone")
        ) from None
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if option := _OPTION.fullmatch(word.strip("()\"'")):
            value = option[2] if option[2] is not None else "" if _OPTION.match(after) else after.strip("()")
            found[option[1].replace("-", "_")] = value
    return found


def read_megatron(options: Mapping[str, object], source: str, file: str) -> Imported:
    """Returns the import of the options; raises CompileError if a size is not an integer, or tp x stages does not divide the ranks."""
    read = _Options(options, file)
    tp, stages = read.integer(TP, 1), read.integer(STAGES, 1)
    ranks = read.integer("world_size", 0) or read.integer("nproc_per_node", 0) * read.integer("nnodes", 1)
    dp = max(1, ranks // (tp * stages))
    if ranks % (tp * stages):
        read.problem(
            f"{ranks} ranks are not a multiple of {tp} x {stages}", "give sizes whose product divides the ranks"
        )
    degrees = {"tp": tp, "stages": stages} | ({"dp": dp} if ranks else {})
    batch, micro = read.integer("global_batch_size", 0), read.integer("micro_batch_size", 0)
    training = [f"batch: {batch}"] if batch else []
    microbatches = batch // (micro * dp) if batch and micro and batch % (micro * dp) == 0 else 1
    if batch and micro and batch % (micro * dp):
        read.problem(
            f"a batch of {batch} is not a multiple of {micro} records on {dp} ranks", "give a batch that they divide"
        )
    if microbatches > 1 and stages == 1:
        training.append(f"accumulate: {microbatches}")
    training += read.training(dp)
    if read.problems:
        raise CompileError(read.problems)
    return Imported(
        source,
        degrees,
        training=tuple(training) if read.trains else (),
        microbatches=microbatches if read.trains else 1,
        pipeline=f"pipeline: {{microbatches: {microbatches}, schedule: 1f1b}}" if stages > 1 and read.trains else "",
        precision=read.precision(),
        ignored=tuple(read.left()),
    )


class _Options:
    """Options while they are read: those taken, and the problems found."""

    def __init__(self, options: Mapping[str, object], file: str) -> None:
        self.options, self.file = options, file
        self.taken: set[str] = set()
        self.problems: list[Problem] = []

    @property
    def trains(self) -> bool:
        """Whether the options are those of a training: they have a learning rate."""
        return "lr" in self.options

    def problem(self, fact: str, remedy: str) -> None:
        self.problems.append(Problem(self.file, fact, help=remedy))

    def integer(self, name: str, default: int, least: int = 1) -> int:
        return int(
            self._number(name, default, lambda text: int(text, 10), f"a whole number of at least {least}", least)
        )

    def number(self, name: str, default: float) -> float:
        return self._number(name, default, float, "a number", float("-inf"))

    def _number(self, name: str, default: float, parse: Callable[[str], float], wanted: str, least: float) -> float:
        if name not in self.options:
            return default
        self.taken.add(name)
        try:
            value = parse(str(self.options[name]))
        except ValueError:
            value = float("nan")
        if not value >= least:
            self.problem(
                f"{name} is {self.options[name]!r}, not {wanted}", "write the number itself: variables are not read"
            )
            return 1
        return value

    def text(self, name: str, default: str) -> str:
        self.taken.add(name)
        return str(self.options.get(name, default))

    def flag(self, name: str) -> bool:
        self.taken.add(name)
        return str(self.options.get(name, "false")).lower() not in ("false", "0", "none")

    def training(self, dp: int) -> list[str]:
        """Returns the lines of `train:` other than the batch and the loss."""
        kind = self.text("optimizer", "adam")
        keys = [f"lr: {self.number('lr', 0.001):g}"]
        decay = self.number("weight_decay", 0.01)
        if kind == "sgd":
            keys += [f"momentum: {self.number('sgd_momentum', 0.9):g}"]
        else:
            betas = f"[{self.number('adam_beta1', 0.9):g}, {self.number('adam_beta2', 0.999):g}]"
            keys += [f"betas: {betas}", f"eps: {self.number('adam_eps', 1e-8):g}"]
        keys += [f"weight_decay: {decay:g}"] if decay else []
        if self.flag("use_distributed_optimizer") and dp > 1:
            keys.append("shard: dp")
        type_ = "momentum" if kind == "sgd" else "adamw"
        lines = [f"optimizer: {{type: {type_}, {', '.join(keys)}}}"]
        steps = self.integer("train_iters", 0)
        lines += self._schedule(steps)
        clip = self.number("clip_grad", 1.0)
        lines += [f"clip: {{norm: {clip:g}}}"] if clip else []
        lines += [f"steps: {steps}"] if steps else []
        lines += [f"seed: {self.integer('seed', 0, 0)}"] if "seed" in self.options else []
        lines += [f"evaluate: {self.integer('eval_interval', 0)}"] if "eval_interval" in self.options else []
        if "save_interval" in self.options:
            lines.append(f"checkpoint: {{every: {self.integer('save_interval', 0)}}}")
        return lines

    def _schedule(self, steps: int) -> list[str]:
        style = self.text("lr_decay_style", "linear")
        warmup = self.integer("lr_warmup_iters", 0, 0)
        warm = [f"warmup: {warmup}", "from_zero: true"] if warmup else []
        if style == "constant":
            return [f"schedule: {{type: constant, {', '.join(warm)}}}"] if warm else []
        length = self.integer("lr_decay_iters", steps)
        if style not in ("linear", "cosine") or not length:
            self.taken.discard("lr_decay_style")
            return []
        least = self.number("min_lr", 0.0)
        parts = [f"type: {style}", f"steps: {length}", *warm, *([f"minimum: {least:g}"] if least else [])]
        return [f"schedule: {{{', '.join(parts)}}}"]

    def precision(self) -> str:
        """Returns the section `precision` for 16 bits; "" without them."""
        for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
            if self.flag(name):
                return f"precision: {{compute: {kind}}}"
        return ""

    def left(self) -> list[str]:
        """Returns the options without a counterpart."""
        off = ("", "false", "0", "1", "none")
        sized = {name for name in self.options if name.endswith("_parallel_size")}
        return [
            f"--{name.replace('_', '-')}{f' {value}' if str(value) else ''}: {_HINTS.get(name, 'partc has no such option')}"
            for name, value in self.options.items()
            if not (name in self.taken or _OF_THE_MODEL.fullmatch(name) or _WITHOUT_EFFECT.fullmatch(name))
            and not (name in sized and str(value).lower() in off)
        ]
