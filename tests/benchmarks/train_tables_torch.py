"""The recommendation model in PyTorch with sparse or dense gradients of its tables, measured in turns; started by `train_tables.py`.

    python train_tables_torch.py FOLDER --optimizer sgd --form sparse --model '{"tables": 8, "rows": 100000, "width": 16}'

Of `lazy_adam` tables are updated by SparseAdam, or with dense gradients by Adam, and the perceptrons by SGD. With RANK and WORLD_SIZE it
is one of several ranks in DistributedDataParallel over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from train_cases import LR, feeds
from train_torch import FIRST, ClickLoss
from training_models import dlrm
from training_torch import network
from turns import serve, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optimizer", choices=("sgd", "lazy_adam"), required=True)
    parser.add_argument("--form", choices=("sparse", "dense"), required=True)
    parser.add_argument("--model", type=json.loads, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    net = network(dlrm(**options.model))
    with np.load(options.folder / "weights.npz") as stored:
        net.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored.files}, strict=False)
    tables = [one for one in net.modules() if isinstance(one, torch.nn.Embedding)]
    for table in tables:
        table.sparse = options.form == "sparse"
    rows = [table.weight for table in tables]
    rest = [one for one in net.parameters() if not any(one is other for other in rows)]
    module: torch.nn.Module = ClickLoss(net)
    if ranks > 1:
        dist.init_process_group("gloo")
        module = torch.nn.parallel.DistributedDataParallel(module)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(rest, lr=LR)]
    if options.optimizer == "sgd":
        optimizers.append(torch.optim.SGD(rows, lr=LR))
    else:
        optimizers.append((torch.optim.SparseAdam if options.form == "sparse" else torch.optim.Adam)(rows, lr=LR))
    batch = {name: torch.from_numpy(array) for name, array in feeds(options.folder, rank).items()}

    def step() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: torch.Tensor = module(**batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    losses = []
    for _ in range(FIRST):
        loss = step()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / ranks)
    if rank == 0:
        np.save(options.folder / f"torch_{options.form}.npy", np.array(losses))
    serve(step, told(), rank == 0)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
