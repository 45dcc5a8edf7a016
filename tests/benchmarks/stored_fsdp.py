"""Stored parameters against torch's FSDP2 over gloo: losses, gathered bytes at once by counting, messages, and CPU seconds of a step.

    python tests/benchmarks/stored_fsdp.py [--ranks 2 3 4] [--layers 4] [--width 192] [--steps 5] [--keep]

Both sides train the GPT of the samples from the same weights on the same batches by AdamW, one thread a rank; with each layer and what is
left as units of FSDP, and each layer, the embeddings, the norm and the head as units here. The ranks of partc are threads of one process,
those of torch processes. FSDP's bytes are counted where its parameter groups are gathered and freed. The interpreter has torch.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[1] / "training"))

from training_equivalence import fed, put, source_of, tensors
from training_models import Feeds, gpt

LR, EPS, DECAY, BATCH, SEQ = 1e-3, 1e-6, 0.1, 12, 64
PLAN = """
ranks: {ranks}
mesh: {{dp: {ranks}}}
symbols: {{batch: {{divisor: {ranks}, max: {batch}}}, seq: {{max: {seq}}}}}
dataset: {{x: [dp, null], labels: [dp, null]}}
parameters: {{"**": {{stored: dp{how}}}}}
train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}}
  optimizer: {{type: adamw, lr: {lr}, eps: {eps}, weight_decay: {decay}}}
"""


def cpu_seconds() -> float:
    """The user and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def batches(sizes: dict[str, int], steps: int) -> list[Feeds]:
    """The batches of all steps."""
    rng = np.random.default_rng(3)
    return [gpt(**sizes).feeds(rng, batch=BATCH, seq=SEQ) for _ in range(steps)]


def partc_side(folder: Path, sizes: dict[str, int], ranks: int, steps: int, keep: bool) -> dict[str, Any]:
    """Trains on in-process ranks; the first weights are written for the other side."""
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.read import parse_plan
    from partc.runtime import load_local

    how = ", after_forward: keep" if keep else ""
    text = PLAN.format(ranks=ranks, batch=BATCH, seq=SEQ, how=how, lr=LR, eps=EPS, decay=DECAY)
    program = compile_source(source_of(gpt(**sizes)), parse_plan(text, "plan.yaml"), folder / "build").program
    stored, feeds = program.stored, batches(sizes, steps)
    assert stored is not None
    with load_local(folder / "build") as local:
        before = tensors(local)
        np.savez(folder / "weights.npz", **{name: one for name, one in before.items() if name.count(".adam") == 0})
        local({**fed(local, 0), **feeds[0]})
        put(local, before)
        begin = cpu_seconds()
        losses = [float(local({**fed(local, k), **step})["loss"]) for k, step in enumerate(feeds)]
        spent = (cpu_seconds() - begin) / steps / ranks
    gathers = sum(event.op_type == "AllGather" for event in program.events)
    scatters = sum(event.op_type == "ReduceScatter" for event in program.events)
    peak = max(one.bytes for one in stored.peaks)
    return {"losses": losses, "peak": peak, "messages": (gathers, scatters), "seconds": spent}


def torch_rank(folder: Path, sizes: dict[str, int], steps: int, keep: bool) -> None:
    """One rank of FSDP2; the first writes what it has found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn import functional
    from training_torch import network

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one = gpt(**sizes)
    net: Any = network(one)
    with np.load(folder / "weights.npz") as known:
        net.load_state_dict({name: torch.from_numpy(known[name]) for name, _ in net.named_parameters()}, strict=False)
    counted = {"now": 0, "peak": 0, "gathers": 0}
    gather, free = FSDPParamGroup.unshard, FSDPParamGroup.reshard
    held: set[int] = set()

    def size(group: Any) -> int:
        return sum(4 * p._orig_size.numel() for p in group.fsdp_params)

    def unshard(self: Any, *arguments: Any, **named: Any) -> Any:
        if id(self) not in held and not self.is_unsharded:
            held.add(id(self))
            counted["now"] += size(self)
            counted["gathers"] += 1
            counted["peak"] = max(counted["peak"], counted["now"])
        return gather(self, *arguments, **named)

    def reshard(self: Any, *arguments: Any, **named: Any) -> Any:
        made = free(self, *arguments, **named)
        if id(self) in held and self.is_sharded:
            held.discard(id(self))
            counted["now"] -= size(self)
        return made

    FSDPParamGroup.unshard, FSDPParamGroup.reshard = unshard, reshard
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(net, mesh=mesh, reshard_after_forward=not keep)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
    losses, begin = [], cpu_seconds()
    share = BATCH // ranks
    for feeds in batches(sizes, steps):
        x, labels = (torch.from_numpy(feeds[name][rank * share : (rank + 1) * share]) for name in ("x", "labels"))
        loss = functional.cross_entropy(net(x).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    spent = (cpu_seconds() - begin) / steps
    if rank == 0:
        gathers = counted["gathers"] / steps
        np.savez(folder / "torch.npz", losses=losses, peak=counted["peak"], gathers=gathers, seconds=spent)
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--keep", action="store_true", help="what is gathered is kept to the backward pass, on both sides"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"layers": options.layers, "width": options.width, "heads": 12, "vocabulary": 384, "context": 128}
    if options.folder is not None:
        torch_rank(options.folder, sizes, options.steps, options.keep)
        return
    print(
        "ranks   losses apart   gathered at once, MB: torch, partc   gathers: torch, partc  scatters   CPU s a step: torch, partc, ratio"
    )
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            own = partc_side(folder, sizes, ranks, options.steps, options.keep)
            command = [sys.executable, __file__, "--folder", name, "--steps", str(options.steps)]
            command += ["--layers", str(options.layers), "--width", str(options.width), *(["--keep"] * options.keep)]
            port = str(free_port())
            common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            common |= {"OMP_NUM_THREADS": "1"}
            jobs = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(ranks)]
            assert [job.wait() for job in jobs] == [0] * ranks
            with np.load(folder / "torch.npz") as found:
                off = float(np.abs(found["losses"] - own["losses"]).max())
                gathers, scatters = own["messages"]
                seconds = float(found["seconds"])
                print(
                    f"{ranks:5d}   {off:12.1e}   {found['peak'] / 1e6:27.2f}, {own['peak'] / 1e6:5.2f}   {float(found['gathers']):14.0f}, "
                    f"{gathers:5d}   {scatters:8d}   {seconds:19.3f}, {own['seconds']:5.3f}, {own['seconds'] / seconds:5.2f}"
                )


if __name__ == "__main__":
    main()
