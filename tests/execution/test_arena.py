"""The arena: values that live at the same time never overlap, memory is shared, and random programs compute what they should."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from artifact_text import write
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from partc.runtime import load
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.artifact.tensors.tensor import ALIGNMENT, Value
from partc.runtime.communication.in_process import LocalTransport, LocalWorld
from partc.runtime.communication.transport import Request
from partc.runtime.program.memory_plan import Arena, Lifetime, assign


@st.composite
def many_lives(draw: st.DrawFn) -> list[Lifetime]:
    """Random lives: sends lie between birth and death."""
    lives = []
    for index in range(draw(st.integers(1, 25))):
        born = draw(st.integers(0, 30))
        died = draw(st.integers(born, born + 12))
        sends = draw(st.lists(st.integers(born + 1, died), max_size=3, unique=True)) if died > born else []
        lives.append(Lifetime(f"v{index}", draw(st.integers(0, 700)), born, died, tuple(sorted(sends))))
    return lives


def violations(lives: list[Lifetime], arena: Arena) -> list[str]:
    """Pairs that overlap while both live; a send in flight lives until the step that waits for it, else for ever."""
    waited = {send: step for step, sends in arena.waits.items() for send in sends}

    def end(life: Lifetime) -> float:
        return max([life.died, *(waited.get(send, float("inf")) - 0.5 for send in life.sends)])

    found = []
    for index, one in enumerate(lives):
        for other in lives[:index]:
            together = one.born <= end(other) and other.born <= end(one)
            first, second = arena.offsets[one.name], arena.offsets[other.name]
            if together and first < second + other.bytes and second < first + one.bytes:
                found.append(f"{one} and {other}")
    return found


@given(many_lives())
def test_values_that_live_together_do_not_overlap(lives: list[Lifetime]) -> None:
    arena = assign(lives)
    assert violations(lives, arena) == []
    assert all(arena.offsets[life.name] % ALIGNMENT == 0 for life in lives)
    assert all(arena.offsets[life.name] + life.bytes <= arena.bytes for life in lives)


@given(many_lives())
def test_a_send_is_waited_for_once_after_it_was_issued(lives: list[Lifetime]) -> None:
    arena = assign(lives)
    waits = [(step, send) for step, sends in arena.waits.items() for send in sends]
    assert all(send < step - 1 for step, send in waits)
    by_life = [send for _, send in waits]
    assert len(by_life) <= sum(len(life.sends) for life in lives)


def test_a_chain_takes_two_slots() -> None:
    arena = assign([Lifetime(f"h{index}", 100, index, index + 1) for index in range(24)])
    assert arena.bytes == 2 * 128
    assert arena.waits == {}


def test_a_slot_in_flight_is_taken_only_after_waiting_for_its_send() -> None:
    lives = [Lifetime("a", 64, 0, 1, (1,)), Lifetime("b", 64, 2, 4), Lifetime("c", 64, 4, 5)]
    arena = assign(lives)
    assert arena.offsets == {"a": 0, "b": 64, "c": 0}
    assert arena.waits == {4: [1]}
    assert arena.bytes == 128


def test_a_gap_is_filled_before_the_arena_grows() -> None:
    lives = [Lifetime("a", 64, 0, 9), Lifetime("b", 64, 1, 2), Lifetime("c", 64, 2, 9), Lifetime("d", 64, 4, 9)]
    assert assign(lives).offsets == {"a": 0, "b": 64, "c": 128, "d": 64}


@given(many_lives())
def test_a_value_without_sends_lies_at_the_lowest_place_that_is_free(lives: list[Lifetime]) -> None:
    lives = [replace(life, sends=()) for life in lives]
    offsets = assign(lives).offsets
    there: list[tuple[int, int, Lifetime]] = []
    for life in sorted((one for one in lives if one.bytes), key=lambda one: one.born):
        size = -(-life.bytes // ALIGNMENT) * ALIGNMENT
        held = [(begin, end) for begin, end, one in there if one.died >= life.born]
        free = (at for at in (0, *(end for _, end in held)) if all(e <= at or at + size <= b for b, e in held))
        assert offsets[life.name] == min(free)
        there.append((offsets[life.name], offsets[life.name] + size, life))


class Lazy(LocalTransport):
    """Sends that copy nothing until they must: the message is whatever lies in the buffer when somebody waits for it.

    So a buffer that is written too early spoils the message, as it may over MPI.
    """

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.outbox: dict[int, tuple[Bytes, int, int]] = {}
        self.count = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        self.count += 1
        self.outbox[self.count] = (buffer, peer, tag)
        return self.count

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        if isinstance(request, int):
            self._post(request)
            return
        # A rank that sleeps lets its messages go: others may need them to go on.
        for number in list(self.outbox):
            self._post(number)
        super().wait(request, what)

    def _post(self, number: int) -> None:
        if number in self.outbox:
            buffer, peer, tag = self.outbox.pop(number)
            super().isend(buffer, peer, tag)


EPSILON, TANH = 2.0**-23, 1e-6
"""What an op of float32 rounds by, relative to its result, and Tanh at most."""


def run(folder: Path, inputs: Mapping[str, object], lazy: bool, steps: int) -> list[dict[str, Value]]:
    """The outputs of every step, merged over ranks."""
    world = LocalWorld(3)
    transports = [Lazy(world, rank) if lazy else world.transport(rank) for rank in range(3)]

    def rank(transport: LocalTransport) -> list[dict[str, Value]]:
        # Loading is collective: each rank in its own thread.
        try:
            program = load(folder, transport, threads=1, trust=True)
            return [program({"x": np.asarray(inputs["x"]) + step}) for step in range(steps)]
        except BaseException as error:
            world.fail(str(error))
            raise

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(rank, transports))
    return [{name: value for one in found for name, value in one[step].items()} for step in range(steps)]


def random_program(seed: int) -> tuple[list[str], Callable[[np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]]:
    """Three ranks, random ops, random wires, and the same computed plainly."""
    chance = random.Random(seed)
    bodies: list[list[str]] = [[], [], []]
    stated: list[set[str]] = [set(), set(), set()]
    at: dict[str, set[int]] = {"x": {0}}
    recipe: list[tuple[str, list[str], str]] = []
    outputs: dict[str, int] = {}
    tag = 0
    for index in range(chance.randint(3, 25)):
        rank = chance.randrange(3)
        op, count = chance.choice([("Neg", 1), ("Tanh", 1), ("Add", 2), ("Mul", 2)])
        sources = [chance.choice(list(at)[-6:]) for _ in range(count)]
        for source in sources:
            if rank not in at[source]:
                home = chance.choice(sorted(at[source]))
                bodies[home].append(f"= partc.comm.Send <peer = {rank}, tag = {tag}> ({source})")
                bodies[rank].append(f"{source} = partc.comm.Recv <peer = {home}, tag = {tag}> ()")
                stated[home].add(source)
                stated[rank].add(source)
                at[source].add(rank)
                tag += 1
        name = f"v{index}"
        bodies[rank].append(f"{name} = {op}({', '.join(sources)})")
        stated[rank].add(name)
        at[name] = {rank}
        recipe.append((op, sources, name))
        if chance.random() < 0.15 or index < 1:
            outputs[name] = rank
    graphs = []
    for rank in range(3):
        given = "float[n, 5] x" if rank == 0 else ""
        wanted = ", ".join(f"float[n, 5] {name}" for name, home in outputs.items() if home == rank)
        own = {name for name, home in outputs.items() if home == rank} | ({"x"} if rank == 0 else set())
        infos = ", ".join(f"float[n, 5] {name}" for name in sorted(stated[rank] - own))
        graphs.append(f"rank{rank} ({given}) => ({wanted}) <{infos}> {{ {' '.join(bodies[rank])} }}")

    def plain(x: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Each output with a bound of its rounding: that of an op, and what the op makes of its operands' rounding."""
        values = {"x": (x, np.zeros_like(x))}
        known = {"Neg": np.negative, "Tanh": np.tanh, "Add": np.add, "Mul": np.multiply}
        for op, sources, name in recipe:
            given = [values[source] for source in sources]
            made = known[op](*(value for value, _ in given))
            errors = [error for _, error in given]
            match op:
                case "Neg":
                    (bound,) = errors
                case "Tanh":
                    bound = errors[0] + TANH
                case "Add":
                    bound = sum(errors) + EPSILON * np.abs(made)
                case _:
                    (one, _), (other, _) = given
                    bound = np.abs(one) * errors[1] + np.abs(other) * errors[0] + EPSILON * np.abs(made)
            values[name] = made, bound
        return {name: values[name] for name in outputs}

    return graphs, plain


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.booleans())
@example(17112, False)  # numbers of 10,000 cancel
def test_random_programs_compute_what_they_should(seed: int, lazy: bool) -> None:
    graphs, plain = random_program(seed)
    x = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)
    with TemporaryDirectory() as folder:
        found = run(write(Path(folder), graphs), {"x": x}, lazy, 2)
    for step, outputs in enumerate(found):
        expected = plain(x + np.float32(step))
        assert outputs.keys() == expected.keys()
        for name, value in outputs.items():
            want, bound = expected[name]
            assert (np.abs(np.asarray(value) - want) <= 2 * bound).all(), "more than both sides may round"


def test_the_lazy_transport_sees_a_buffer_that_is_written_too_early() -> None:
    world = LocalWorld(2)
    buffer = np.zeros(4, np.uint8)
    sender = Lazy(world, 0)
    request = sender.isend(buffer, 1, 0)
    buffer[:] = 7
    sender.wait(request, lambda: "a send")
    got = np.empty(4, np.uint8)
    receiver = world.transport(1)
    receiver.wait(receiver.irecv(got, 0, 0), lambda: "a receive")
    assert got.tolist() == [7] * 4


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_differ(seed: int) -> None:
    assert random_program(seed)[0] != random_program(seed + 1)[0]
