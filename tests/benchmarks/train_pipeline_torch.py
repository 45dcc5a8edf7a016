"""A GPT as a pipeline in PyTorch (`torch.distributed.pipelining`, 1F1B over gloo), measured in turns; started by `train_pipeline.py`.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python train_pipeline_torch.py FOLDER --layers 12 --width 512 ...

Each rank is a stage with its part of the layers and one thread. A step is the microbatches' forward and backward passes, the loss sent to
rank 0, and the update by SGD with momentum. The losses of the first steps go to FOLDER/torch.npy.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from train_cases import LR, MOMENTUM, feeds
from training_models import gpt
from training_torch import network
from turns import serve, told

FIRST = 3


class Stage(torch.nn.Module):
    """Some layers of a GPT, with its tables if they are the first, and its head if they are the last."""

    def __init__(self, whole: torch.nn.Module, stage: int, stages: int) -> None:
        super().__init__()
        count = len(whole.layers)
        self.layers = whole.layers[count * stage // stages : count * (stage + 1) // stages]
        self.tokens, self.positions = (whole.tokens, whole.positions) if stage == 0 else (None, None)
        self.norm, self.head = (whole.norm, whole.head) if stage == stages - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        visible = places <= places.unsqueeze(1)
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(places)
        for layer in self.layers:
            x = layer(x, visible)
        return x if self.norm is None else self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("layers", "width", "heads", "vocabulary", "context", "microbatches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    net = network(gpt(options.width, options.layers, options.heads, options.vocabulary, options.context))
    with np.load(options.folder / "weights.npz") as stored:
        left = net.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored.files}, strict=False)
    assert {name for name, _ in net.named_parameters()}.isdisjoint(left.missing_keys), left.missing_keys
    module = Stage(net, rank, ranks)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, options.microbatches, lambda y, label: functional.cross_entropy(y.flatten(0, -2), label.flatten())
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    batch = {name: torch.from_numpy(array) for name, array in feeds(options.folder, 0).items()}
    last = rank == ranks - 1

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        if rank == 0 and not last:
            schedule.step(batch["x"])
        else:
            schedule.step(target=batch["label"], losses=found, return_outputs=False)
        loss = torch.stack(found).mean().detach() if last else torch.zeros(())
        if last:
            dist.send(loss, 0)
        elif rank == 0:
            dist.recv(loss, ranks - 1)
        optimizer.step()
        return loss

    losses = [float(step()) for _ in range(FIRST)]
    if rank == 0:
        np.save(options.folder / "torch.npy", np.array(losses))
    serve(step, told(), rank == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
