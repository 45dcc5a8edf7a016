"""Training in PyTorch, measured in turns: alone, or one of several ranks in DistributedDataParallel over gloo, one thread each.

    python train_torch.py FOLDER --case mlp            alone, with the batch of all parts
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python train_torch.py FOLDER --case mlp

A step is forward, backward, the sum over ranks and the update by SGD with momentum. The losses of the first steps, by which the sides
are held against each other, go to FOLDER/torch.npy.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from train_cases import CASES, LR, MOMENTUM, feeds
from train_memory_report import Memory
from training_torch import network
from turns import serve, told

FIRST = 3


class Loss(torch.nn.Module):
    """The network with its loss, so that what is wrapped is called once a step."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x).flatten(0, -2), label.flatten())


class ClickLoss(Loss):
    """The same of a network that answers with the chance of a click."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.binary_cross_entropy_with_logits(self.net(x, ids), clicked)


def by_op(step: Callable[[], object], steps: int) -> dict[str, float]:
    """The ms of a step in each op itself, without the ops that it calls, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    spent = {event.key: event.self_cpu_time_total / 1e3 / steps for event in profile.key_averages()}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--fused", action="store_true", help="SGD in one kernel, which is not torch's default")
    parser.add_argument("--memory", action="store_true", help="report memory at the end")
    parser.add_argument(
        "--kernels", type=int, metavar="STEPS", help="print the ms of a step by op, of so many steps, and end"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = Memory()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    net = network(CASES[options.case].model())
    with np.load(options.folder / "weights.npz") as stored:
        left = net.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored.files}, strict=False)
    known = {name for name, _ in net.named_parameters()}
    assert known.isdisjoint(left.missing_keys), left.missing_keys
    module: torch.nn.Module = (ClickLoss if options.case == "dlrm" else Loss)(net)
    if ranks > 1:
        dist.init_process_group("gloo")
        module = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, fused=options.fused or None)
    batch = {name: torch.from_numpy(array) for name, array in feeds(options.folder, rank).items()}

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for _ in range(FIRST):
        loss = step()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / ranks)
    if rank == 0:
        np.save(options.folder / "torch.npy", np.array(losses))
    memory.note("first steps")
    if options.kernels:
        print(json.dumps(by_op(step, options.kernels)))
        return
    serve(step, told(), rank == 0)
    if options.memory:
        print(memory.said(), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
