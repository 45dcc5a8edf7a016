"""Stored parameters against torch's FSDP2 over gloo: losses, bytes of parameters and gradients, messages, and CPU seconds of a step.

    python tests/benchmarks/stored_fsdp.py [--models gpt llama mixtral] [--ranks 2 3 4] [--steps 5] [--turns 3] [--keep]

Both sides are processes of one thread a rank: those of partc over MPI, those of torch over gloo. They train from the same weights on
the same batches by AdamW, in float32; each layer and the rest are units of FSDP, and each layer, the embeddings, the norm and the head
are units here.

    losses apart      the largest difference of the losses of the first steps
    gathered          the most bytes of gathered parameters that rank 0 has at once: as the manifest states it, in the memory plan of the
                      runtime, and where groups of FSDP are gathered and freed
    gradients         the same of gradients that are not reduced yet
    RSS               the most memory of rank 0 from before the weights are read to the end, with optimizer, activations and messages
    gathers           AllGathers of a step, and the formula: two for each unit that both passes read, but one for the first that the
                      backward pass reads, and one for each table; a parameter that is cut along another dim than its first has messages
                      of its own
    CPU               user seconds of all ranks for a step, the median of the turns, in which the sides alternate

The interpreter has torch, and transformers for Llama and Mixtral.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[1] / "training"))

from partc.runtime.communication.mpi_calls import settings
from train_data_parallel import free_port
from train_memory_report import Memory
from training_equivalence import source_of
from training_models import gpt
from transformer import ROOT, mpi_command
from turns import Side, answer, told

LR, EPS, DECAY, WORDS = 1e-3, 1e-6, 0.1, 384
PLAN = """
ranks: {ranks}
mesh: {{dp: {ranks}}}
symbols: {{{batch}: {{divisor: {ranks}, max: {size}}}, {seq}: {{max: {length}}}}}
dataset: {{{ids}: [dp, null], labels: [dp, null]}}
parameters: {{"**": {{stored: dp{how}}}}}
train:
  loss: {{type: softmax_cross_entropy, logits: {logits}, labels: labels, axis: 2}}
  optimizer: {{type: adamw, lr: {lr}, eps: {eps}, weight_decay: {decay}}}
"""


@dataclass(frozen=True)
class Sizes:
    """The model, the batch and the steps of a comparison, as both sides read them from a file."""

    model: str
    ranks: int
    width: int
    layers: int
    batch: int
    length: int
    steps: int
    keep: bool

    @property
    def names(self) -> tuple[str, str]:
        """The names of the inputs and of the logits."""
        return ("x", "y") if self.model == "gpt" else ("input_ids", "logits")

    def gpt(self) -> Any:
        """The GPT of the samples."""
        context = max(self.length, 16)
        return gpt(width=self.width, layers=self.layers, heads=8, vocabulary=WORDS, context=context)

    def config(self) -> Any:
        """The configuration of a decoder of transformers."""
        import transformers

        sizes = {"vocab_size": WORDS, "hidden_size": self.width, "num_hidden_layers": self.layers}
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": max(self.length, 16)}
        sizes |= {"use_cache": False, "tie_word_embeddings": False}
        if self.model == "llama":
            return transformers.LlamaConfig(**sizes, intermediate_size=3 * self.width)
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": self.width}
        return transformers.MixtralConfig(**sizes, **experts)

    def batches(self, count: int) -> list[dict[str, np.ndarray]]:
        """The same batches on both sides."""
        chance = np.random.default_rng(3)
        shape = (self.batch, self.length)
        return [{name: chance.integers(0, WORDS, shape) for name in (self.names[0], "labels")} for _ in range(count)]


def user_seconds() -> float:
    """The user time of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def compile_model(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Writes the artifact, and the first weights for the other side; returns what the artifact states and what its memory plan has."""
    from partc.compiler.pipeline import compile_model, compile_source
    from partc.compiler.plan.read import parse_plan

    ids, logits = sizes.names
    symbols = ("batch", "seq") if sizes.model == "gpt" else ("batch", "sequence")
    numbers = {"ranks": sizes.ranks, "size": sizes.batch, "length": sizes.length, "lr": LR, "eps": EPS, "decay": DECAY}
    how = ", after_forward: keep" if sizes.keep else ""
    text = PLAN.format(**numbers, batch=symbols[0], seq=symbols[1], ids=ids, logits=logits, how=how)
    (folder / "plan.yaml").write_text(text)
    if sizes.model == "gpt":
        source = source_of(sizes.gpt())
        initial = source.model.graph.initializers.items()
        np.savez(folder / "weights.npz", **{name: one.const_value.numpy() for name, one in initial if one.const_value})
        compile_source(source, parse_plan(text, "plan.yaml"), folder / "build")
    else:
        import torch
        import transformers

        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(sizes.config()).save_pretrained(folder / "model")
        compile_model(folder / "model", folder / "plan.yaml", folder / "build")
    return counted(folder / "build", dict(zip(symbols, (sizes.batch, sizes.length), strict=True)))


def counted(build: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """The stated peak of gathered bytes, and those of gathered parameters and whole gradients in the memory plan of rank 0's runtime."""
    import onnx
    from partc.compiler.cost.memory import memory_over_step
    from partc.runtime.artifact.manifest import open_artifact

    artifact = open_artifact(build)
    manifest = artifact.manifest
    stored = manifest.stored
    assert stored is not None
    actions, lives = memory_over_step(artifact, 0, sizes)
    units = {tensor for unit in stored.units for tensor in unit.tensors}
    gathers = [one for one in manifest.collectives if one.op == "AllGather" and {*one.sources} <= units]
    nodes = onnx.load(build / "rank_0000.onnx", load_external_data=False).graph.node
    by_op = {op: [node for node in nodes if node.op_type == op] for op in ("AllGather", "ReduceScatter")}
    gathered = {name for node in by_op["AllGather"] if {*node.input} <= units for name in node.output}
    gradients = {name for node in by_op["ReduceScatter"] for name in node.input}

    def most(names: set[str]) -> int:
        own = [one for one in lives if one.name in names]
        spans = [(one.born, max([one.died, *one.sends]), one.bytes) for one in own]
        return max((sum(b for begin, end, b in spans if begin <= at <= end) for at in range(len(actions))), default=0)

    freed = stored.units[-2].freed
    alone = {
        node.input[0] for node in by_op["AllGather"] if any(one.name == "axis" and one.i for one in node.attribute)
    }
    formula = 0
    for one in stored.units:  # a table, which only the forward pass reads, and the last unit are gathered once
        messages = len(alone & {*one.tensors}) + bool({*one.tensors} - alone)
        formula += messages * (2 if freed and one is not stored.units[-1] and one.gathers > messages else 1)
    return {
        "stated": max(one.bytes for one in stored.peaks),
        "gathered": most(gathered),
        "gradients": most(gradients),
        "gathers": len(gathers),
        "scatters": sum(one.op == "ReduceScatter" for one in manifest.collectives),
        "formula": formula,
        "units": len(stored.units),
    }


def measured(step: Callable[[], object], turns: Iterator[int], total: Callable[[float], float], first: bool) -> None:
    """Takes as many steps as each turn says, and answers with the user seconds of all ranks for one."""
    if first:
        answer([])
    for count in turns:
        begin = user_seconds()
        for _ in range(count):
            step()
        spent = total(user_seconds() - begin) / max(1, count)
        if first:
            answer([spent])


def partc_rank(folder: Path, sizes: Sizes) -> None:
    """One rank of partc under MPI."""
    from mpi4py import MPI
    from partc.runtime import load_trainer
    from transformer_partc import told_all

    comm, memory = MPI.COMM_WORLD, Memory()
    batches = sizes.batches(sizes.steps)
    share = sizes.batch // sizes.ranks
    mine = [
        {name: one[comm.rank * share : (comm.rank + 1) * share] for name, one in batch.items()} for batch in batches
    ]
    with load_trainer(folder / "build", comm, threads=1) as trainer:
        losses = [trainer.train(batch).get("loss") for batch in mine]
        found = [row for row in comm.gather(losses) or [] if row[0] is not None]
        if comm.rank == 0:
            np.save(folder / "partc.npy", np.array(found[0], float))
        measured(lambda: trainer.train(mine[-1]), told_all(comm), lambda s: comm.allreduce(s), comm.rank == 0)
        if comm.rank == 0:
            print(memory.said(), flush=True)


def torch_rank(folder: Path, sizes: Sizes) -> None:
    """One rank of FSDP2; the first writes what it has counted."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn import functional

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if sizes.model == "gpt":
        from training_torch import network

        memory = Memory()
        net: Any = network(sizes.gpt())
        with np.load(folder / "weights.npz") as known:
            weights = {name: torch.from_numpy(known[name]) for name, _ in net.named_parameters()}
        net.load_state_dict(weights, strict=False)
        del weights
        layers, forward = net.layers, net
    else:
        import transformers

        memory = Memory()
        net = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        layers = net.model.layers

        def forward(ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = net(input_ids=ids).logits
            return logits

    counted = dict.fromkeys(("now", "gathered", "gathers", "gradients", "scatters"), 0)
    gather, free, reduce = FSDPParamGroup.unshard, FSDPParamGroup.reshard, FSDPParamGroup.post_backward
    held: dict[int, Any] = {}

    def size(group: Any) -> int:
        return sum(4 * p._orig_size.numel() for p in group.fsdp_params)

    def unshard(self: Any, *arguments: Any, **named: Any) -> Any:
        if id(self) not in held and not self.is_unsharded:
            held[id(self)] = self
            counted["now"] += size(self)
            counted["gathers"] += 1
            counted["gathered"] = max(counted["gathered"], counted["now"])
        return gather(self, *arguments, **named)

    def reshard(self: Any, *arguments: Any, **named: Any) -> Any:
        made = free(self, *arguments, **named)
        if id(self) in held and self.is_sharded:
            del held[id(self)]
            counted["now"] -= size(self)
        return made

    def post_backward(self: Any, *arguments: Any, **named: Any) -> Any:
        there = [p._unsharded_param.grad for group in held.values() for p in group.fsdp_params]
        counted["gradients"] = max(counted["gradients"], sum(g.nbytes for g in there if g is not None))
        counted["scatters"] += 1
        return reduce(self, *arguments, **named)

    FSDPParamGroup.unshard, FSDPParamGroup.reshard, FSDPParamGroup.post_backward = unshard, reshard, post_backward
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not sizes.keep)
    fully_shard(net, mesh=mesh, reshard_after_forward=not sizes.keep)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
    share = sizes.batch // ranks

    def step(batch: dict[str, np.ndarray]) -> float:
        own = (torch.from_numpy(one[rank * share : (rank + 1) * share]) for one in batch.values())
        ids, labels = own
        loss = functional.cross_entropy(forward(ids).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / ranks

    def total(seconds: float) -> float:
        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    batches = sizes.batches(sizes.steps)
    losses = [step(batch) for batch in batches]
    if rank == 0:
        np.save(folder / "torch.npy", np.array(losses))
        each = {name: counted[name] / sizes.steps for name in ("gathers", "scatters")}
        (folder / "torch.json").write_text(json.dumps({**counted, **each}))
    measured(lambda: step(batches[-1]), told(), total, rank == 0)
    if rank == 0:
        print(memory.said(), flush=True)
    dist.destroy_process_group()


def compare(sizes: Sizes, turns: int) -> str:
    """The row of one model on so many ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sizes.json").write_text(json.dumps(sizes.__dict__))
        own = compile_model(folder, sizes)
        script = [__file__, "--side"]
        one = mpi_command(sizes.ranks, *script, "partc", "--folder", name)
        other = [sys.executable, *script, "torch", "--folder", name]
        common = {"WORLD_SIZE": str(sizes.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        threads = {"OMP_NUM_THREADS": "1"}
        sides = [
            Side("partc", [one], [{**settings(5), **ROOT, **threads}]),
            Side("torch", [other] * sizes.ranks, [{**common, **threads, "RANK": str(k)} for k in range(sizes.ranks)]),
        ]
        for turn in range(turns + 1):
            for side in sides:
                side.times += side.turn(2)[: 1 if turn else 0]
        peaks = [json.loads(side.close().splitlines()[-1])["peak"] for side in sides]
        off = float(np.abs(np.load(folder / "partc.npy") - np.load(folder / "torch.npy")).max())
        there = json.loads((folder / "torch.json").read_text())
    cpu = [statistics.median(side.times) for side in sides]
    megabytes = [own["stated"], own["gathered"], there["gathered"], own["gradients"], there["gradients"]]
    mb = [f"{one / 1e6:8.2f}" for one in megabytes]
    return (
        f"{sizes.model:8} {sizes.ranks:5d} {off:8.1e} {' '.join(mb)} {peaks[0]:7.0f} {peaks[1]:6.0f} "
        f"{own['gathers']:5d} {own['formula']:7d} {there['gathers']:6.0f} {own['scatters']:5d} {there['scatters']:6.0f} "
        f"{cpu[0]:7.3f} {cpu[1]:7.3f} {cpu[0] / cpu[1]:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "llama", "mixtral"], choices=["gpt", "llama", "mixtral"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="keep what is gathered to the backward pass, on both sides")
    parser.add_argument("--side", choices=["partc", "torch"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.side is not None:
        sizes = Sizes(**json.loads((said.folder / "sizes.json").read_text()))
        {"partc": partc_rank, "torch": torch_rank}[said.side](said.folder, sizes)
        return
    print(
        "ranks, losses apart | gathered at once, MB | gradients, MB | peak RSS, MB | gathers | scatters | CPU s a step"
    )
    print(
        f"{'model':8} {'ranks':>5} {'losses':>8} {'stated':>8} {'partc':>8} {'torch':>8} {'partc':>8} {'torch':>8} {'partc':>7} "
        f"{'torch':>6} {'partc':>5} {'formula':>7} {'torch':>6} {'partc':>5} {'torch':>6} {'partc':>7} {'torch':>7} {'ratio':>6}"
    )
    for model in said.models:
        for ranks in said.ranks:
            sizes = Sizes(model, ranks, said.width, said.layers, said.batch, said.length, said.steps, said.keep)
            print(compare(sizes, said.turns), flush=True)


if __name__ == "__main__":
    main()
