"""The benchmarks' transformer in JAX, cut over devices of the CPU as partc's plan cuts it; started by the benchmarks.

python transformer_jax.py FOLDER --layers 6 --heads 8 --devices 2                     measured in turns
python transformer_jax.py - --layers 48 --width 1600 --heads 16 --sequence 1024 --vocabulary 50304 --devices 8 --compile
                                                                    shapes only: prints the seconds of it
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from turns import serve, told

_WIDE, _NARROW = ("attention.query", "attention.key", "attention.value", "up"), ("attention.out", "down")


def prepare(devices: int) -> None:
    """So many devices of one thread each; before JAX is imported."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def cut(name: str, dims: int) -> Any:
    """How a weight is cut along the axis `tp`."""
    from jax.sharding import PartitionSpec

    path, _, kind = name.rpartition(".")
    if path.endswith(_WIDE) or path == "head":
        return PartitionSpec(*[None] * (dims - 1), "tp")
    if path.endswith(_NARROW) and kind == "weight":
        return PartitionSpec("tp", None)
    return PartitionSpec()


def network(weights: Mapping[str, Any], x: Any, layers: int, heads: int) -> Any:
    """The encoder, or the GPT where there is an embedding."""
    import jax
    import jax.numpy as jnp

    def linear(path: str, x: Any) -> Any:
        return x @ weights[f"{path}.weight"] + weights[f"{path}.bias"]

    def norm(path: str, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights[f"{path}.weight"] + weights[f"{path}.bias"]

    def attention(path: str, x: Any) -> Any:
        batch, sequence, width = x.shape
        query, key, value = (
            linear(f"{path}.{name}", x).reshape(batch, sequence, heads, -1) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
        if "tokens.weight" in weights:
            scores = jnp.where(jnp.triu(jnp.ones((sequence, sequence), bool), 1), -1e9, scores)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), value)
        return linear(f"{path}.out", mixed.reshape(batch, sequence, width))

    if "tokens.weight" in weights:
        x = weights["tokens.weight"][x] + weights["positions.weight"]
    for k in range(layers):
        x = x + attention(f"h.{k}.attention", norm(f"h.{k}.norm1", x))
        inner = jax.nn.gelu(linear(f"h.{k}.up", norm(f"h.{k}.norm2", x)), approximate=False)
        x = x + linear(f"h.{k}.down", inner)
    x = norm("norm", x)
    return x @ weights["head.weight"] if "head.weight" in weights else x


def measured(options: argparse.Namespace) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    with np.load(options.folder / "weights.npz") as stored:
        weights = {
            name: jax.device_put(stored[name], NamedSharding(mesh, cut(name, stored[name].ndim)))
            for name in stored.files
        }
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(functools.partial(network, layers=options.layers, heads=options.heads), out_shardings=whole)
    x = np.load(options.folder / "x.npy")

    def run() -> Any:
        return np.asarray(step(weights, jax.device_put(x, whole)))

    np.save(options.folder / "jax.npy", run())
    serve(run, told())


def shapes(options: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the GPT's weights, as `network.py` has them."""
    width = options.width
    yield "tokens.weight", (options.vocabulary, width)
    yield "positions.weight", (options.sequence, width)
    for k in range(options.layers):
        for name in ("norm1", "norm2"):
            yield f"h.{k}.{name}.weight", (width,)
            yield f"h.{k}.{name}.bias", (width,)
        for name in (*_WIDE, *_NARROW):
            yield f"h.{k}.{name}.weight", (width * (4 if name == "down" else 1), width * (4 if name == "up" else 1))
            yield f"h.{k}.{name}.bias", (width * (4 if name == "up" else 1),)
    yield "norm.weight", (width,)
    yield "norm.bias", (width,)
    yield "head.weight", (width, options.vocabulary)


def compiled(options: argparse.Namespace) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(-1, options.tensor_parallel or options.devices), ("dp", "tp"))
    weights = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, cut(name, len(shape))))
        for name, shape in shapes(options)
    }
    ids = jax.ShapeDtypeStruct(
        (options.batch, options.sequence), np.int32, sharding=NamedSharding(mesh, PartitionSpec("dp", None))
    )
    step = jax.jit(functools.partial(network, layers=options.layers, heads=options.heads))
    cpu, clock = time.process_time(), time.perf_counter()
    lowered = step.lower(weights, ids)
    lower = time.process_time() - cpu
    lowered.compile()
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    print(json.dumps({"cpu": cpu, "clock": clock, "lower": round(lower, 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("layers", "heads", "devices"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("width", "sequence", "vocabulary", "tensor-parallel"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    prepare(options.devices)
    (compiled if options.compile else measured)(options)


if __name__ == "__main__":
    main()
