"""Rank files around a collective, run on in-process ranks and by the numpy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator
from partc.runtime import load
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.in_process import LocalWorld
from reference_ops import reference_ops


def spmd(op: str, attributes: str, given: str, made: str, ranks: int, types: str = "float") -> list[str]:
    """One graph for each rank: the rank's own input, doubled, through one collective, and the result negated."""
    return [
        f"""rank{rank} ({types}[{given}] x{rank}) => ({types}[{made}] y{rank}) <{types}[{given}] h, {types}[{made}] k>
        {{ h = Add(x{rank}, x{rank})
           k = partc.comm.{op} <group = "all", tag = 3, {attributes}> (h)
           y{rank} = Neg(k) }}"""
        for rank in range(ranks)
    ]


def shards(shape: tuple[int, ...], ranks: int, dtype: object = np.float32) -> list[Array]:
    """A value for each rank, all different."""
    random = np.random.default_rng(ranks)
    return [random.integers(-9, 9, shape).astype(dtype) for _ in range(ranks)]


def run(folder: Path, given: list[Array]) -> list[Array]:
    """What each rank computes of its own value; twice, since a schedule's memory is used again."""
    assert check_artifact(folder) == []
    world = LocalWorld(len(given))

    def rank(index: int) -> Array:
        try:
            with load(folder, world.transport(index)) as program:
                (port,) = program.inputs
                (first,) = program({port.name: given[index]}).values()
                (again,) = program({port.name: given[index]}).values()
            np.testing.assert_array_equal(first, again)
            return np.asarray(first)
        except BaseException as error:
            world.fail(str(error))
            raise
        finally:
            world.finish(index)

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(rank, range(len(given))))


def run_reference(folder: Path, given: list[Array]) -> list[Array]:
    """What each rank computes of its own value by the numpy reference."""
    world, artifact = LocalWorld(len(given)), open_artifact(folder)

    def rank(index: int) -> Array:
        ops = reference_ops(world.transport(index), artifact.manifest.groups_of(index))
        evaluator = ReferenceEvaluator(artifact.model(index), new_ops=ops)
        return np.asarray(evaluator.run(None, {evaluator.input_names[0]: given[index]})[0])

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(rank, range(len(given))))


def run_reference_of_all(folder: Path, ranks: int, fed: dict[str, Array]) -> dict[str, Array]:
    """All outputs of all ranks by the numpy reference."""
    world, artifact = LocalWorld(ranks), open_artifact(folder)

    def rank(index: int) -> dict[str, Array]:
        ops = reference_ops(world.transport(index), artifact.manifest.groups_of(index))
        evaluator = ReferenceEvaluator(artifact.model(index), new_ops=ops)
        given = {name: fed[name] for name in evaluator.input_names}
        return dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))

    with ThreadPoolExecutor(ranks) as threads:
        return {name: one for found in threads.map(rank, range(ranks)) for name, one in found.items()}


def same(found: list[Array], wanted: list[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def whole(ranks: int) -> dict[str, list[list[int]]]:
    return {"all": [list(range(ranks))]}
