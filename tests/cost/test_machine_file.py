"""The machine file: what is written is read again, curves and collectives by their laws, and every mistake at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines import curve, machine, shared
from partc.compiler.cost.machine import Curve, Link
from partc.compiler.cost.machine_file import machine_text, read_machine
from partc.compiler.errors import CompileError

SPLIT = ("ReduceScatter", "AllGather", "AllToAll")
GOOD = """machine: 1
cores: 2
targets:
  cpu:
    session: 8us
    step: 160us
    products: {matmul: {65.5 kFLOP: 9us, 33.6 MFLOP: 1.1ms}}
    kernels: {elementwise: {4KiB: 1.2us, 16MiB: 4.1ms}}
links:
  - {name: default, ranks: 2, stride: 1, overlap: 0.3, wake: 3us, send: {1KiB: 21us, 4MiB: 2ms}, all_reduce: {1KiB: 28us, 4MiB: 4ms}}
"""


def read(tmp_path: Path, text: str) -> str:
    """What is wrong with a file; empty where nothing is."""
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    try:
        read_machine(path)
    except CompileError as error:
        return str(error).replace(str(tmp_path), "")
    return ""


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    one = machine(cores=3, overlap=0.25)
    link = replace(one.links[0], split={op: curve(k * 1e9) for k, op in enumerate(SPLIT, 2)})
    text = machine_text(replace(one, links=[link]))
    (tmp_path / "machine.yaml").write_text(text)
    found = read_machine(tmp_path / "machine.yaml")
    assert machine_text(found) == text
    assert found.cores == 3
    assert found.links[0].overlap == 0.25
    assert [found.links[0].collective(op, 2, 1 << 20) for op in SPLIT] == pytest.approx(
        [524e-6, 350e-6, 262e-6], rel=1e-2
    )
    assert found.processor("cuda").session == pytest.approx(5e-6)


def test_ranks_of_a_host_share_its_memory(tmp_path: Path) -> None:
    """A product of 2 ms beside two other ranks takes half of that alone, and between them where there is one other."""
    text = machine_text(shared(machine(cores=4), ranks=3))
    (tmp_path / "machine.yaml").write_text(text)
    found = read_machine(tmp_path / "machine.yaml")
    assert machine_text(found) == text
    busy = [found.busy(*on) for on in ((1,), (2,), (3,), (8,), (4, 2), (4, 4))]
    assert busy == [1, 2, 3, 3, 2, 1]
    for table in ("products", "kernels"):
        curves = [next(iter(getattr(found.among(one).processors["cpu"], table).values())) for one in (1, 2, 3)]
        assert [one(2e6) for one in curves] == pytest.approx([1e-3, 1.5e-3, 2e-3], rel=1e-2)
    assert machine(cores=4).busy(4) == 1, "however many work, it is known of none"


def test_curves_of_other_points_meet_between(tmp_path: Path) -> None:
    fast, slow = Curve(((1e3, 1e-6), (1e6, 5e-4))), Curve(((1e4, 2e-5), (1e5, 4e-4), (1e7, 1e-1)))
    for amount in (10.0, 1e3, 5e3, 5e4, 3e5, 5e6, 1e8):
        assert fast.towards(slow, 0.25)(amount) == pytest.approx(0.75 * fast(amount) + 0.25 * slow(amount))


ALONE = GOOD.replace(
    "links:\n",
    """    ranks: 2
    alone:
      session: 7us
      step: 160us
      products: {matmul: {65.5 kFLOP: 9us, 33.6 MFLOP: 1.1ms}}
      kernels: {elementwise: {4KiB: 1.2us, 16MiB: 2ms}}
links:
""",
)


def test_a_curve_is_straight_between_points_and_ends_in_its_speed() -> None:
    one = Curve(((1e3, 1e-6), (1e5, 1e-4)))
    assert one(10) == 1e-6
    assert one(5.05e4) == pytest.approx(5.05e-5)
    assert one(1e7) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("AllReduce", 2, 1e-3),
        ("AllReduce", 4, 6 * 10e-6 + 1.5 * 0.98e-3),
        ("ReduceScatter", 4, 3 * 10e-6 + 0.75 * 0.98e-3),
        ("AllGather", 4, 3 * 10e-6 + 3 * 0.98e-3),
        ("AllToAll", 2, 10e-6 + 0.5 * 0.98e-3),
        ("Broadcast", 2, 10e-6 + 0.98e-3),
        ("AllReduce", 1, 0.0),
    ],
)
def test_a_collective_by_hops_and_share(op: str, ranks: int, seconds: float) -> None:
    """Of a megabyte that takes a millisecond among two, of which 20 us are two hops."""
    link = Link("default", 2, 1, 1.0, 0.0, curve(1e9, 10e-6), Curve(((1.0, 20e-6), (1e6, 1e-3))))
    assert link.collective(op, ranks, 1e6) == pytest.approx(seconds)


def test_a_collective_that_was_measured_is_priced_by_itself() -> None:
    """Among two an AllGather has one hop and sends what is given, so four ranks take three times that."""
    halves, own = Curve(((1.0, 20e-6), (1e6, 1e-3))), Curve(((1.0, 5e-6), (1e6, 3e-3)))
    link = Link("default", 2, 1, 1.0, 0.0, curve(1e9, 10e-6), halves, {"AllGather": own})
    assert link.collective("AllGather", 2, 1e6) == pytest.approx(own(1e6))
    assert link.collective("AllGather", 4, 1e6) == pytest.approx(3 * own(1e6))
    assert link.collective("ReduceScatter", 2, 1e6) == pytest.approx(halves(1e6) / 2), "its share of an AllReduce"


def test_many_ranks_agree_by_a_tree() -> None:
    assert machine().links[0].collective("AllReduce", 4096, 1) == pytest.approx(2 * 12 * 10e-6)


def test_the_link_is_that_of_the_stride() -> None:
    two = [machine().links[0], Link("dp", 2, 4, 1.0, 0.0, curve(1e6), curve(1e6))]
    both = type(machine())("", 0, machine().processors, two)
    assert [both.link(ranks).name for ranks in ((0, 1), (0, 4, 8), (1, 5), (0, 1, 5))] == [
        "default",
        "dp",
        "dp",
        "default",
    ]


def test_a_good_file_has_no_mistake(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == ""


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = (
        GOOD.replace("session: 8us", "session: 8")
        .replace("160us", "-160us")
        .replace("9us", "9")
        .replace("4KiB", "4")
        .replace("0.3", "1.3")
    )
    text = text.replace("cores: 2", "cores: -2").replace("stride: 1, ", "").replace("21us", "fast")
    found = read(tmp_path, text)
    for line in (
        "/machine.yaml:5: 'session' is 8, without a unit",
        "/machine.yaml:6: 'step' is '-160us', which is negative",
        "/machine.yaml:7: '65.5 kFLOP' is 9, without a unit",
        "/machine.yaml:8: '4' is not an amount",
        "/machine.yaml:2: 'cores' is -2",
        "/machine.yaml:10: 'overlap' is 1.3",
        "/machine.yaml:10: 'stride' is missing",
        "/machine.yaml:10: '1KiB' is 'fast'",
    ):
        assert line in found, found
    assert found.count("help: ") == 8


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "a machine file is a mapping"),
        ("[1, 2]", "a machine file is a mapping"),
        ("machine: 2\n", "'machine' is 2, this partc reads 1"),
        (GOOD.replace("links:\n", "links: 3\nrest:\n"), "'links' is not a list"),
        (GOOD.replace("{65.5 kFLOP: 9us, 33.6 MFLOP: 1.1ms}", "{}"), "'matmul' has no point"),
        (GOOD.replace("matmul", "conv"), "'products' has no 'matmul'"),
        (GOOD.replace("ranks: 2,", "ranks: 1,"), "'ranks' is 1"),
        (GOOD + "network: 3\n", "'network' is not a key here"),
        (GOOD.replace("4ms}}\n", "4ms}, all_gather: {1KiB: 28}}\n"), "'1KiB' is 28, without a unit"),
        (ALONE.replace("7us", "9us"), "/machine.yaml:11: 'session' is 9 us, beside other ranks 8 us"),
        (ALONE.replace("2ms}}\nl", "5ms}}\nl"), "'elementwise' at 16.0 MiB is 5 ms, beside other ranks 4.1 ms"),
        (ALONE.replace("16MiB: 2ms", "16KiB: 5us"), "'elementwise' at 16.0 KiB is 5 us, beside other ranks"),
        (ALONE.replace("ranks: 2\n", "ranks: 1\n"), "/machine.yaml:9: 'ranks' is 1"),
        (ALONE.replace("    ranks: 2\n", ""), "'ranks' is missing"),
        (GOOD.replace("links:", "    ranks: 2\nlinks:"), "'alone' is missing"),
        (
            ALONE.replace("{elementwise: {4KiB: 1.2us, 16MiB: 2ms}}", "{elementwise: {4KiB: 1us}, sort: {4KiB: 1us}}"),
            "same",
        ),
        (ALONE.replace("      step: 160us\n", "      step: 160us\n      alone: {}\n"), "'alone' is not a key here"),
        ("machine: [", "this is not YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, fact: str) -> None:
    assert fact in read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="the machine file cannot be read: No such file"):
        read_machine(tmp_path / "none.yaml")
