"""Adds a plan's adapters to the products of a model; their weights have the names of peft and torch.

The source is rewritten before any pass, and after `quantize`: `partc verify` compares with the adapted model on one rank. A training trains
only the adapters' weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.adapter_folder import Adapter, LowRank, read_adapter
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import AbsentTensor, DrawnTensor
from partc.compiler.ir.program import Loaded
from partc.compiler.matching import matched_nodes, nothing_matched
from partc.compiler.plan.adapters import AdapterRule
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.plan.rules import Plan
from partc.compiler.rewrite.adapters import AdaptedProduct, adapted_products, add_adapter, as_type, stacked
from partc.compiler.rewrite.generation.next_token import head_of, scores_of
from partc.compiler.start import start
from partc.runtime.artifact.format import Law
from partc.runtime.spellings import nearest
from partc.runtime.units import first_of


def adapted(source: Source, plan: Plan | None, name: str) -> Source:
    """Returns the source with the plan's adapters; the source itself if there are none, or it has them already.

    Raises CompileError with all faults of their folders, and with each module that the model does not have, or has in other sizes.
    """
    room = 0 if plan is None or plan.generate is None else plan.generate.adapters
    if plan is None or not (plan.adapters or room) or source.adapted:
        return source
    program = start(replace(source, model=source.model.clone()), replace(plan, generate=None), name)
    known = adapted_products(program.paths)
    if plan.generate is not None:
        stacks = _stacks(program, plan.generate, known)
        return replace(source, declared=replace(source.declared, adapters=stacks), adapted=True)
    (rule,) = plan.adapters
    weights = set[ir.Value]()
    read = None if rule.folder is None else read_adapter(rule.folder, rule.where)
    if read is not None and read.replaced:
        _replace(program, rule, read, source.absent)
    for module, (products, added) in _places(program, rule, read, known).items():
        for product in products:
            weights.update(
                add_adapter(program.model.graph, product, module, _absent(module, added) if source.absent else added)
            )
    if plan.train is not None:
        from partc.compiler.training.trainable import TRAINABLE

        for value in program.model.graph.initializers.values():
            value.meta[TRAINABLE] = value in weights
    return replace(source, model=program.model, adapted=True)


def _stacks(
    program: Loaded, generate: GenerateRules, known: Sequence[AdaptedProduct]
) -> dict[str, dict[str, ir.TensorProtocol]]:
    """Maps each module to which some adapter adds, or which has room for adapters, to the stacks of all adapters."""
    rules, room = program.plan.adapters, generate.adapters
    if room and len(rules) > room:
        fact = f"'adapters' has room for {room}, and the plan has {len(rules)}"
        raise CompileError(Problem(generate.where("adapters"), fact, "", f"write adapters: {len(rules)} or more"))
    stacks = dict[str, list[LowRank | None]]()
    products = _with_room(program, known) if room else {}
    for module in products:
        stacks[module] = [None] * room
    for place, rule in enumerate(rules):
        assert rule.folder is not None
        read = read_adapter(rule.folder, rule.where)
        if read.replaced:
            raise CompileError(_shared(rule, read, "sequences of a batch share the weights of their model"))
        for module, (own, added) in _places(program, rule, read, known).items():
            name = own[0].module if room else module
            stacks.setdefault(name, [None] * (room or len(rules)))[place] = added
            products[name] = own[0]
    least = generate.adapter_rank if room else 1
    return {
        module: stacked(added, products[module].sizes, products[module].dtype, module, least)
        for module, added in stacks.items()
    }


def _with_room(program: Loaded, known: Sequence[AdaptedProduct]) -> dict[str, AdaptedProduct]:
    """Maps each module whose product adapters may change to the product: modules with one weight, except the head."""
    head = head_of(scores_of(program.model.graph.outputs, program.name))
    by_module = dict[str, list[AdaptedProduct]]()
    for product in known:
        if product.node is not head:
            by_module.setdefault(product.module, []).append(product)
    return {module: same[0] for module, same in by_module.items() if len({one.weight for one in same}) == 1}


def _places(
    program: Loaded, rule: AdapterRule, read: Adapter | None, known: Sequence[AdaptedProduct]
) -> dict[str, tuple[list[AdaptedProduct], LowRank]]:
    """Maps each module of an adapter to its products and the adapter's weights for them."""
    if read is None:
        return _new(program, rule, known)
    found = {module: [product for product in known if product.is_of(module)] for module in read.products}
    if problems := [Problem(rule.where, *one) for one in _misfits(rule, read.products, found, known)]:
        raise CompileError(problems)
    return {module: (found[module], added) for module, added in read.products.items()}


def _shared(rule: AdapterRule, read: Adapter, law: str) -> Problem:
    """Returns the refusal of an adapter that replaces weights of the model."""
    fact = f"'{rule.name}' replaces {first_of([*map(repr, read.replaced)])}"
    return Problem(rule.where, fact, law, "compile the folder that merge_and_unload() and save_pretrained() write")


def _replace(program: Loaded, rule: AdapterRule, read: Adapter, absent: bool) -> None:
    """Gives the model the weights that the adapter has in place of its own."""
    if rule.entry.train:
        raise CompileError(_shared(rule, read, "the two narrow weights of an adapter are all that 'train' changes"))
    weights, problems = program.model.graph.initializers, list[Problem]()
    for name, tensor in read.replaced.items():
        fact, module = "", name.rpartition(".")[0]
        if (value := weights.get(name)) is None:
            fact = "the model has no such weight"
        elif tuple(value.shape or ()) != tuple(tensor.shape):
            fact = f"it is {list(tensor.shape)}, of the model {list(value.shape or ())}"
        elif others := [
            program.paths[node] for node in value.consumers() if not program.paths[node].startswith(f"{module}.")
        ]:
            fact = f"of the model it is also read by '{others[0]}'"
        elif not absent and value.dtype is not None:
            value.const_value = as_type(tensor, value.dtype)
        if fact:
            problems.append(
                Problem(rule.where, f"'{rule.name}' replaces '{name}': {fact}", "", "give the adapter of this model")
            )
    if problems:
        raise CompileError(problems)


def _misfits(
    rule: AdapterRule,
    read: Mapping[str, LowRank],
    by_module: Mapping[str, Sequence[AdaptedProduct]],
    known: Sequence[AdaptedProduct],
) -> Iterator[tuple[str, str, str]]:
    """Yields the reasons for which an adapter does not fit the model: fact, law and remedy."""
    modules = [product.path.rpartition(".")[0] for product in known]
    for module, added in read.items():
        products = by_module[module]
        sizes = {product.sizes for product in products}
        if not products:
            near = first_of([*map(repr, nearest(module, modules))])
            law = "an adapter adds to the products of its model's modules with constant weights"
            yield (
                f"'{rule.name}' adds to '{module}', which the model does not have",
                law,
                f"the nearest are {near}" if near else "",
            )
        elif len({product.weight for product in products}) > 1:
            paths = first_of([repr(product.path) for product in products])
            yield f"'{rule.name}' adds to '{module}', which has several products: {paths}", "", ""
        elif sizes != {added.sizes}:
            (own,) = sizes
            fact = f"'{rule.name}' adds {list(added.sizes)} to '{module}', which is {list(own)}"
            yield fact, "inputs and outputs of an adapter are those of its base", "give the adapter of this model"


def _new(
    program: Loaded, rule: AdapterRule, known: Sequence[AdaptedProduct]
) -> dict[str, tuple[list[AdaptedProduct], LowRank]]:
    """Returns a new adapter: A drawn as in peft, uniform within 1 / sqrt(inputs), and B of zeros."""
    entry = rule.entry
    assert entry.on is not None
    nodes = set(matched_nodes(program, entry.on))
    if not nodes:
        raise CompileError(nothing_matched(program, entry.on, rule.where))
    by_module: dict[str, tuple[list[AdaptedProduct], LowRank]] = {}
    for product in known:
        if product.node not in nodes:
            continue
        module = product.path.rpartition(".")[0] or product.path
        inputs, outputs = product.sizes
        bound = 1 / math.sqrt(inputs)
        name = f"{module}.lora_A.weight"
        a = _drawn(
            (entry.rank, inputs), Law(draw="uniform", stream=f"{entry.seed}/{name}", offset=-bound, factor=2 * bound)
        )
        b = _drawn((outputs, entry.rank), Law(draw="constant"))
        by_module.setdefault(module, ([], LowRank(a, b, entry.alpha / entry.rank)))[0].append(product)
    if not by_module:
        fact = f"'{entry.on}' matches no product with a constant weight"
        paths = first_of([repr(product.path) for product in known])
        raise CompileError(
            Problem(
                rule.where, fact, "an adapter adds to such products", f"those of the model are {paths}" if paths else ""
            )
        )
    return by_module


def _drawn(shape: tuple[int, int], law: Law) -> DrawnTensor:
    return DrawnTensor(lambda: law, ir.DataType.FLOAT, shape)


def _absent(module: str, added: LowRank) -> LowRank:
    """Returns the adapter for a model without weights: names, types and shapes."""
    a, b = (
        AbsentTensor(tensor.dtype, tensor.shape.numpy(), f"{module}.lora_{key}.weight")
        for key, tensor in (("A", added.a), ("B", added.b))
    )
    return replace(added, a=a, b=b)
