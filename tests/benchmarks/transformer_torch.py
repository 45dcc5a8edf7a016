"""The benchmarks' transformer in PyTorch, cut over gloo ranks as partc's plan cuts it; started by `transformer.py`.

Environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Every rank has its heads and its part of the inner linear; a layer has
two all_reduce.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from turns import serve, told

_WIDE, _NARROW = ("attention.query", "attention.key", "attention.value", "up"), ("attention.out", "down")


def mine(name: str, values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's part of a weight; a bias that is added to a sum over ranks is a part of that sum on rank 0 only."""
    path, _, kind = name.rpartition(".")
    if path.endswith(_WIDE):
        return values.chunk(size, -1)[rank].contiguous()
    if path.endswith(_NARROW):
        if kind == "weight":
            return values.chunk(size, 0)[rank].contiguous()
        return values
    return values


class Network:
    def __init__(self, weights: dict[str, torch.Tensor], layers: int, heads: int) -> None:
        self.weights, self.layers, self.heads = weights, layers, heads
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def linear(self, path: str, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.weights[f"{path}.bias"], x.flatten(0, 1), self.weights[f"{path}.weight"]).unflatten(
            0, x.shape[:2]
        )

    def summed(self, path: str, x: torch.Tensor) -> torch.Tensor:
        made = x @ self.weights[f"{path}.weight"]
        dist.all_reduce(made)
        return made + self.weights[f"{path}.bias"]

    def norm(self, path: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weights[f"{path}.weight"], self.weights[f"{path}.bias"])

    def attention(self, path: str, x: torch.Tensor) -> torch.Tensor:
        turned = [
            self.linear(f"{path}.{name}", x).unflatten(2, (self.heads // self.size, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        ]
        mixed = functional.scaled_dot_product_attention(*turned)
        return self.summed(f"{path}.out", mixed.transpose(1, 2).flatten(2))

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(self.layers):
            x = x + self.attention(f"h.{k}.attention", self.norm(f"h.{k}.norm1", x))
            inner = functional.gelu(self.linear(f"h.{k}.up", self.norm(f"h.{k}.norm2", x)))
            x = x + self.summed(f"h.{k}.down", inner)
        return self.norm("norm", x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with np.load(options.folder / "weights.npz") as stored:
        weights = {name: mine(name, torch.from_numpy(stored[name]), rank, size) for name in stored.files}
    network = Network(weights, options.layers, options.heads)
    x = torch.from_numpy(np.load(options.folder / "x.npy"))
    made = network(x)
    if rank == 0:
        np.save(options.folder / "torch.npy", made.numpy())
    serve(lambda: network(x), told(), rank == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
