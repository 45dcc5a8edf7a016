"""Causal attention with its tokens over ranks against torch's ring on gloo: results, gradients, bytes, and CPU seconds of a step.

    python tests/benchmarks/context_torch.py [--ranks 2 3 4 6] [--tokens 768] [--heads 8] [--groups 8] [--depth 32] [--steps 5]

torch's `context_parallel` has no attention of CPUs ("does not have a sharding strategy registered"), so its ring is called below that
layer, with the kernels of CPUs: the same hops, balanced as here (`order: fold`). Keys of fewer heads than queries are repeated before it.
Both sides compute a layer, the mean square of its result, and the gradients of its four weights, one thread a rank; each gradient must
be within 1e-5 of torch on one device, and the loss within 2e-6. The ranks of partc are threads of one process, those of torch processes.
Bytes are those of keys, values and their gradients that the busiest rank receives. The interpreter has torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

import onnx_ir as ir
from partc.compiler import nn
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from stored_fsdp import free_port, user_seconds

BATCH = 2
PLAN = """
ranks: {ranks}
mesh: {{cp: {ranks}}}
context: {{axis: cp, attention: ring, order: fold}}
train:
  loss: {{type: mse, prediction: y, target: target}}
  optimizer: {{type: sgd, lr: 1024.0}}
"""
WEIGHTS = ("q", "k", "v", "out")


class Layer(nn.Module):
    """Causal attention with projections; queries have `heads` heads, keys and values `groups`."""

    def __init__(self, heads: int, groups: int, depth: int) -> None:
        super().__init__()
        self.heads, self.groups, self.depth, width = heads, groups, depth, heads * depth
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * depth, bias=False), nn.Linear(width, groups * depth, bias=False)

    def forward(self, op: Any, x: Any) -> Any:
        def by_head(y: Any, heads: int) -> Any:
            return op.Transpose(op.Reshape(y, op.Constant(value_ints=[0, 0, heads, self.depth])), perm=[0, 2, 1, 3])

        def repeated(y: Any) -> Any:
            times = op.Constant(value_ints=[1, 1, self.heads // self.groups, 1, 1])
            wide = op.Expand(op.Unsqueeze(y, op.Constant(value_ints=[2])), times)
            return op.Reshape(wide, op.Constant(value_ints=[0, self.heads, -1, self.depth]))

        k, v = (repeated(by_head(layer(op, x), self.groups)) for layer in (self.k, self.v))
        scores = op.MatMul(
            op.Mul(by_head(self.q(op, x), self.heads), self.depth**-0.5), op.Transpose(k, perm=[0, 1, 3, 2])
        )
        places = op.Range(0, op.Squeeze(op.Shape(x, start=1, end=2)), 1)
        shares = op.Softmax(op.Where(op.LessOrEqual(places, op.Unsqueeze(places, [1])), scores, -1e9), axis=-1)
        mixed = op.Transpose(op.MatMul(shares, v), perm=[0, 2, 1, 3])
        return self.out(op, op.Reshape(mixed, op.Constant(value_ints=[0, 0, self.heads * self.depth])))


def batch(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """The inputs of each step."""
    rng = np.random.default_rng(5)
    shape = BATCH, sizes["tokens"], sizes["heads"] * sizes["depth"]
    return {name: rng.standard_normal(shape).astype(np.float32) for name in ("x", "target")}


def source(sizes: dict[str, int]) -> Source:
    """The layer, with the same weights each time."""
    nn.seed(7)
    layer, shape = Layer(sizes["heads"], sizes["groups"], sizes["depth"]), batch(sizes)["x"].shape
    return Source(trace(layer, [Spec("x", shape, ir.DataType.FLOAT)], ["y"], "layer.py"))


def partc_side(folder: Path, sizes: dict[str, int], ranks: int, steps: int) -> dict[str, Any]:
    """Trains on in-process ranks; the first weights are written for the other side."""
    from partc.compiler.ir.programs import Comm
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.read import parse_plan
    from partc.runtime import load_local
    from training_equivalence import fed, put, tensors

    program = compile_source(source(sizes), parse_plan(PLAN.format(ranks=ranks), "plan.yaml"), folder / "build").program
    received = [
        sum(
            int(step.bytes)
            for step in part.steps
            if isinstance(step, Comm) and step.op_type == "Exchange" and step.makes
        )
        for part in program.parts
    ]
    with load_local(folder / "build") as local:
        before, feeds = tensors(local), batch(sizes)
        np.savez(folder / "weights.npz", **{name: before[f"{name}.weight"] for name in WEIGHTS})
        loss = local({**fed(local, 0), **feeds})["loss"]
        after = tensors(local)
        gradients = {name: (before[f"{name}.weight"] - after[f"{name}.weight"]) / 1024 for name in WEIGHTS}
        put(local, before)
        begin = user_seconds()
        for step in range(steps):
            local({**fed(local, step), **feeds})
        spent = (user_seconds() - begin) / steps
    return {"loss": float(loss), "gradients": gradients, "bytes": max(received), "seconds": spent}


def torch_rank(folder: Path, sizes: dict[str, int], steps: int) -> None:
    """One rank of torch's ring; the first writes what it has found, with the results of one device."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring
    from torch.nn import functional

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, aten, counted = dist.get_rank(), dist.get_world_size(), torch.ops.aten, [0]
    ring.set_rotate_method("alltoall")
    exchange = ring._AllToAllRotater.exchange_buffers

    def exchanged(self: Any, buffer: Any) -> None:
        counted[0] += buffer.numel() * buffer.element_size()
        exchange(self, buffer)

    ring._AllToAllRotater.exchange_buffers = exchanged

    def back(query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, grad_out: Any) -> Any:
        operands = [one.contiguous() for one in (grad_out, query, key, value, out)]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*operands, logsumexp, 0.0, is_causal)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
            out, total, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, kernel, *operands, is_causal=True)
            ctx.save_for_backward(*operands, out, total)
            return out

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            saved = ctx.saved_tensors
            return tuple(
                ring._templated_ring_attention_backward(dist.group.WORLD, 2, back, dy, "grad_out", *saved, True)[:3]
            )

    def layer(x: Any, attention: Any) -> Any:
        def by_head(name: str) -> Any:
            return functional.linear(x, weights[name]).unflatten(2, (-1, sizes["depth"])).transpose(1, 2).contiguous()

        k, v = (by_head(name).repeat_interleave(sizes["heads"] // sizes["groups"], 1) for name in ("k", "v"))
        return functional.linear(attention(by_head("q"), k, v).transpose(1, 2).flatten(2), weights["out"])

    def part(whole: Any) -> Any:
        runs = whole.chunk(2 * ranks, 1)
        return torch.cat([runs[rank], runs[2 * ranks - 1 - rank]], 1)

    def step(local: bool) -> float:
        x, target = (torch.from_numpy(one) for one in batch(sizes).values())
        attention: Any = Ring.apply
        if local:
            x, target = part(x), part(target)
        else:
            attention = lambda *operands: functional.scaled_dot_product_attention(*operands, is_causal=True)  # noqa: E731
        for one in weights.values():
            one.grad = None
        loss = functional.mse_loss(layer(x, attention), target) / (ranks if local else 1)
        loss.backward()
        total = loss.detach().clone()
        for one in [total, *(one.grad for one in weights.values())] if local else ():
            dist.all_reduce(one)
        return float(total)

    with np.load(folder / "weights.npz") as known:
        weights = {name: torch.from_numpy(known[name]).requires_grad_() for name in WEIGHTS}
    loss = step(local=True)
    counted[0] = 0
    gradients = {name: one.grad.numpy().copy() for name, one in weights.items()}
    begin = user_seconds()
    for _ in range(steps):
        step(local=True)
    spent = torch.tensor((user_seconds() - begin) / steps)
    dist.all_reduce(spent)
    if rank == 0:
        whole = step(local=False)
        one_device = {f"whole.{name}": one.grad.numpy() for name, one in weights.items()}
        found = {**gradients, **one_device, "loss": loss, "whole.loss": whole}
        np.savez(folder / "torch.npz", **found, bytes=counted[0] / steps, seconds=float(spent))
    dist.destroy_process_group()


def compare(folder: Path, sizes: dict[str, int], ranks: int, steps: int) -> dict[str, float]:
    """Runs both sides: errors against torch on one device, bytes, and CPU seconds of all ranks."""
    own = partc_side(folder, sizes, ranks, steps)
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(steps)]
    command += [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        subprocess.Popen(command, env={**common, "OMP_NUM_THREADS": "1", "RANK": str(rank)}) for rank in range(ranks)
    ]
    assert [job.wait() for job in jobs] == [0] * ranks
    with np.load(folder / "torch.npz") as found:
        whole = {name: found[f"whole.{name}"] for name in WEIGHTS}
        largest = max(float(np.abs(one).max()) for one in whole.values())

        def error(gradients: Any, loss: float) -> float:
            assert abs(loss / float(found["whole.loss"]) - 1) < 2e-6, (loss, found["whole.loss"])
            return max(float(np.abs(gradients[name] - whole[name]).max()) for name in WEIGHTS) / largest

        return {
            "error": error(own["gradients"], own["loss"]),
            "torch error": error(found, float(found["loss"])),
            "bytes": own["bytes"],
            "torch bytes": float(found["bytes"]),
            "seconds": own["seconds"],
            "torch seconds": float(found["seconds"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6])
    for name, size in (("tokens", 768), ("heads", 8), ("groups", 8), ("depth", 32), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("tokens", "heads", "groups", "depth")}
    if options.folder is not None:
        torch_rank(options.folder, sizes, options.steps)
        return
    print("ranks   largest error: torch, partc   received, KB: torch, partc, ratio   CPU s a step: torch, partc, ratio")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            found = compare(Path(name), sizes, ranks, options.steps)
        assert max(found["error"], found["torch error"]) < 1e-5, found
        received, seconds = ((found[f"torch {word}"], found[word]) for word in ("bytes", "seconds"))
        print(
            f"{ranks:5d}   {found['torch error']:19.1e}, {found['error']:.1e}   {received[0] / 1e3:19.1f}, {received[1] / 1e3:7.1f}, "
            f"{received[1] / received[0]:5.2f}   {seconds[0]:19.3f}, {seconds[1]:5.3f}, {seconds[1] / seconds[0]:5.2f}"
        )


if __name__ == "__main__":
    main()
