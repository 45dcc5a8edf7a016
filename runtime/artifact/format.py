"""The artifact's format: names of communication ops and their attributes, metadata keys, and the manifest's schema.

This is the one contract between compiler and runtime; `runtime/README.md` explains it to people. A rank file is a standard ONNX model:
nodes of the standard domains plus nodes of `partc.comm`, in the order in which the rank executes and communicates. `Send(X) ->` and `->
Recv(Y)` of one transfer have the same `tag`, and either `peer`, the rank at the other end, or `group`, whose lists are pairs of source and
target: so messages between many pairs have one tag, and the ranks at either end share one file.

A collective is one node on every rank that takes part, and these nodes have the same `tag`, which no other message or collective has.
`group` names an entry of `Manifest.groups`: disjoint lists of ranks. A rank works with the list that contains it, so that ranks with the
same ops share one file. A collective over p ranks of a list:

    AllReduce(X...) -> Y... reduce                   the element-wise sum, max or min of all X, the same bits on every rank; several
                                                     X of one type are sent as one
    AllGather(X...) -> Y... axis                     all X joined along axis, in the list's order; several along axis 0
    ReduceScatter(X...) -> Y... axis, reduce         the i-th of p equal blocks along axis, reduced, for the list's i-th rank
    AllToAll(X) -> Y        split_axis, concat_axis  the i-th block along split_axis goes to the i-th rank; received blocks are joined
    Reduce(X) -> Y          root, reduce             the element-wise reduction of all X, for the list's root-th rank; others have no Y
    Broadcast(X) -> Y       root                     X of the list's root-th rank, for the others; the root may leave Y out, the others X
    Exchange(X) -> Y        send_peers, send_boxes, recv_peers, recv_boxes, rank
                            boxes of X are sent to ranks, boxes of Y come from ranks; X is left out if nothing is sent, Y if nothing is
                            received. Peers are ranks of the job; the rank itself means a copy. A box is `begin, end, denominator`
                            for each of `rank` dims: fractions of the dim of X or Y as this rank has it. The k-th box for a peer is the
                            k-th that it receives from here.
    Pull(table, ids) -> Y, asked, counts, places     owners, rows, row, givers
                            the rows of a table that the ids name. The list's ranks at the places `owners` have it in equal runs of rows, in
                            this order, `rows` in all, each of the shape `row`; only they have `table`. A rank that asks for nothing has no
                            ids and no Y. The other results are for a Push of the ranks at the places `givers`: `asked`, on an owner, the
                            ids of givers, each giver's once, giver by giver, counted from the owner's first row; `counts`: the number of
                            ids that the rank asks of each owner, and then the number that each giver asks of it; `places`, on a giver, maps
                            each id to its place among the giver's distinct ids
    Push(asked, counts, places, dY) -> ids, Y        owners, rows, row, givers
                            the way back: each owner gets rows for the ids that it was asked for, for each giver the sum of its rows of an
                            id. Only rows are sent: `asked`, `counts` and `places` are those of one Pull, and `ids` is `asked`

A program of several microbatches has a function of the domain `partc.task` for each task of the rank: `F0`, `B0` and `W0` are the forward
pass, the backward pass and the weights' gradients of stage 0. The main graph is the rank's row of calls, each with the attribute
`microbatch` and named as schedules write it (`0F3`), with messages between them. In the call for microbatch k an event of the body has the
tag `tag + k`, and a value v of the body that is not an output of it is called `v.k`.

A value other than a weight that differs by rank is a constant, and the file has the law of its items, so that the file is the same on all
ranks:

    RankConstant() -> Y     group, dtype, shape, items
                            a tensor of `shape`, each of its items an expression over `place`, the rank's place in its list

A rank may have several targets, kinds of devices: the metadata of a node names the one that runs it (`partc.target`), a value is on the
target of the node that makes it, and a value that is read on another target is copied there. No other rank takes part in the copy:

    Copy(X) -> Y            to                       X on the target `to`

Types are written as onnxruntime writes them: `tensor(float)`, `seq(tensor(float))`, `optional(tensor(int64))`. A dim is an integer or an
expression over the dims named in `Manifest.symbols` (`batch`, `floor(seq/2) + 1`); None if the shape is known only at run time.

The release of partc, with which its files are marked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.artifact.port import Dim, IdsRecord, LabelRecord, Law, Port, Shape, Transfer, by_rank, one_by_one
from partc.runtime.artifact.ranks import MOST_RANKS, Box, Boxes, Programs, Ranks, lists_by_rank
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.training.training_record import TrainingRecord
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["MOST_RANKS", "Box", "Dim", "IdsRecord", "LabelRecord", "Law", "Port", "Shape", "TrainingRecord", "Transfer"]
FORMAT: Literal[3] = 3
DOMAIN = "partc.comm"
OPTIMIZER = "partc.optimizer"
TASKS = "partc.task"
DOMAIN_VERSION = 1

SEND = "Send"
RECV = "Recv"
ALL_REDUCE = "AllReduce"
ALL_GATHER = "AllGather"
REDUCE_SCATTER = "ReduceScatter"
ALL_TO_ALL = "AllToAll"
REDUCE_TO = "Reduce"
BROADCAST = "Broadcast"
EXCHANGE = "Exchange"
PULL = "Pull"
PUSH = "Push"
ROUTE = "Route"
RETURN = "Return"
RANK_CONSTANT = "RankConstant"
COPY = "Copy"
BEGIN = "Begin"
OTHERWISE = "Otherwise"
END = "End"

KIND = "kind"
MICROBATCH = "microbatch"
PEER = "peer"
TAG = "tag"
GROUP = "group"
REDUCE = "reduce"
AXIS = "axis"
SPLIT_AXIS = "split_axis"
CONCAT_AXIS = "concat_axis"
ROOT = "root"
SEND_PEERS = "send_peers"
SEND_BOXES = "send_boxes"
RECV_PEERS = "recv_peers"
RECV_BOXES = "recv_boxes"
RANK = "rank"
OWNERS = "owners"
ROWS = "rows"
ROW = "row"
GIVERS = "givers"
CAPACITY = "capacity"
DTYPE = "dtype"
SHAPE = "shape"
ITEMS = "items"
TO = "to"
PLACE = "place"
"""The variable in the item expressions of a RankConstant."""

CPU = "cpu"
CUDA = "cuda"
DEVICE = "device"
"""The target of nodes that no pattern of the plan names: the job's choice, by default the CPU."""
TARGETS = (CPU, CUDA, DEVICE)

SUM = "sum"
MAX = "max"
MIN = "min"
REDUCTIONS = (SUM, MAX, MIN)

# metadata_props keys of nodes in a rank file
PATH = "partc.path"
HOP = "partc.hop"
ORDER = "partc.order"
"""The order in which a Gather puts tokens along its axis: `fold 3` is folded order for 3 ranks, `back 3` natural order."""
KEPT_ORDER = "kept"
"""The `partc.order` of a Slice that takes a rank's shard of a value, of a program in which tokens are in folded order."""
RULE = "partc.rule"
CAUSE = "partc.cause"
TASK = "partc.task"
PHASE = "partc.phase"
"""The phase of a compute node in a training program: `backward` or `update`, which includes reducing gradients; absent for forward."""
BYTES = "partc.bytes"
CUT = "partc.cut"
FACTORS = "partc.factors"
"""The correspondence of the dims of a compute node's operands (`graph/factors.py`); in programs that shard, or that generate tokens."""
GROUP_OF_BODY = "partc.group"
"""The group whose ranks run the bodies of an If or Loop together (`graph/bodies.py`)."""
TAGS_OF_BODY = "partc.tags"
"""The tags of the borders of such bodies: where the first begins, where the other branch begins, where the last ends."""
TARGET = "partc.target"
"""The target that runs a compute node."""
RECOMPUTED = "partc.recomputed"
"""The plan line of a recomputation, on a forward node that is repeated in the backward pass. A segment begins before it."""

# rules of nodes that run wherever they are read: on several groups, on each in the form that fits there
CONSTANT = "constant"
SHAPE_ARITHMETIC = "shape arithmetic"
MADE_OF_INPUTS = "made of inputs"

# of a rank file the ranks whose it is, and of its weights which part of which tensor they are, and a hash of those inside the file
OF_RANKS = "partc.ranks"
PIECE = "partc.piece"
DIGEST = "partc.sha256"
STORED = "partc.stored"
SOURCE = "partc.source"

MANIFEST = "manifest.json"
WEIGHTS = "weights"
REFERENCED = "referenced"
BEGIN_IR = "ir/step_parallel_begin.ir"
END_IR = "ir/step_parallel_end.ir"
SCHEDULE = "ir/schedule.txt"

INFER, TRAIN, EVALUATE, EVALUATE_STREAMED = "infer", "train", "evaluate", "evaluate_streamed"
"""Names of programs: that of an artifact that does not train; the training step; and the loss and the metrics alone, for any batch, and for
batches that the microbatches of the step divide.
"""


def rank_file(rank: int, program: str = "") -> str:
    """Returns the file name of a rank's part of the main program, or of another program, whose name then comes first."""
    return f"{_before(program)}rank_{rank:04d}.onnx"


def run_list_file(rank_file: str) -> str:
    """Returns the file of the run list of a rank file: `rank_0000.run.json` for `rank_0000.onnx`."""
    return f"{rank_file.removesuffix('.onnx')}.run.json"


def weights_file(rank: int, program: str = "") -> str:
    """Returns the file of the weights whose lowest using rank is `rank`; for another `program` that of weights which the main one lacks."""
    return f"{WEIGHTS}/{_before(program)}rank_{rank:04d}.safetensors"


def ranks_folder(ranks: int) -> str:
    """Returns the folder, in an artifact, of the artifact of the same plan for another number of ranks."""
    return f"r{ranks}"


def dump_file(file: str, program: str = "") -> str:
    """Returns the file of a text about another program; `file` is the main program's."""
    return file.replace("/", f"/{program}/", 1) if program else file


def _before(program: str) -> str:
    return f"{program}_" if program else ""


def stays_inside(path: str) -> bool:
    """Whether a relative path stays inside its folder, on any operating system."""
    parts = PurePosixPath(path.replace("\\", "/"))
    return bool(path) and not parts.is_absolute() and ".." not in parts.parts and ":" not in path


def inside(path: str) -> str:
    """Returns the path; raises ValueError if it leaves its folder."""
    if not stays_inside(path):
        raise ValueError(f"the path '{path}' leaves the folder")
    return path


class Record(BaseModel):
    """A part of the manifest, or of a checkpoint's index: no field is unknown, and none changes."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


class SymbolRecord(Record):
    """A dynamic dim: `divisor*N + remainder`, N >= 1 where `divisor > 1`, within [min, max]; max None: no bound."""

    min: int = Field(0, ge=0)
    max: int | None = None
    divisor: int = Field(1, ge=1)
    remainder: int = Field(0, ge=0)


class LayoutRecord(Record):
    """How a value lies on ranks (`0-3,8`, in order): they are a grid of the sizes `mesh`, row-major, the last axis fastest.

    `cuts`: by dim the axes that shard it, major first. `partial`: axes along which ranks have partial values, with what reduces them.
    """

    ranks: str
    mesh: list[int]
    cuts: list[list[int]]
    partial: list[tuple[int, str]] = []


class Collective(Record):
    """One collective: `value` is its output's name, `type` and `shape` those of one rank's input, as large on all of them.

    `bytes`, an expression or 'unknown', is what a rank sends. `given` and `made`: how the value lies before and after. `sources`: the
    names of what a rank gives, empty where ranks have several for one.
    """

    tag: int
    op: str
    value: str
    group: str
    type: str
    shape: Shape
    bytes: str
    cause: str
    sources: list[str] = []
    given: LayoutRecord | None = None
    made: LayoutRecord | None = None


GRADIENT_NORM, SCALE, REST, CACHE, ADAPTER = "gradient_norm", "scale", "rest", "cache", "adapter"
"""The output of a step with the norm of its gradients, if the plan reports it. Kinds of state: the loss scale and its count of steps, which
a step updates even if it changes nothing else; the rounding errors of messages; a decoder's keys and values; a stack of adapters'
weights, which no step updates.
"""
OF_A_PLAN = (SCALE, REST)
"""The kinds of state that belong to a plan, not to a model: a checkpoint without them, or with others, is compatible."""


class TensorRecord(Record):
    """A tensor kept from step to step: a parameter, what an optimizer keeps of one, statistics, the scale of the loss, what is left of
    messages, a decoder's cache.

    `value` is its name in the rank files, an input there. `tensor` is its global name, which checkpoints use: `fc1.weight`,
    `fc1.weight.momentum`; a tensor that lies in several ways has a record for each. `shape` is the whole's; `ranks` hold it, whole, or
    the shard that `boxes` says. `parameter`: of whom an optimizer's tensor is. Without a weight of its own in the main program's rank
    file a tensor begins as `initial` says: with this number everywhere, or as the law gives it.
    """

    value: str
    tensor: str
    kind: Literal["parameter", "optimizer", "statistics", "scale", "rest", "cache", "adapter"]
    type: str
    shape: list[int]
    ranks: Ranks
    boxes: Boxes = None
    parameter: str = ""
    initial: float | Law = 0.0

    def box(self, rank: int) -> Box | None:
        """Returns the shard that a rank has; None if it has the global tensor."""
        return None if self.boxes is None else self.boxes[self.ranks.index(rank)]

    def shard(self, rank: int) -> Box:
        """Returns the shard of a rank that has the tensor, as a box even if it is the whole tensor."""
        return self.box(rank) or [[0, 1, 1] for _ in self.shape]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard."""
        if (box := self.box(rank)) is None:
            return tuple(self.shape)
        return tuple(size * (end - begin) // of for size, (begin, end, of) in zip(self.shape, box, strict=True))


class StateRecord(TensorRecord):
    """A tensor of the state as a program has it: `next` is the output that takes its place after a step, empty where nothing does."""

    next: str = ""


class StoredUnitRecord(Record):
    """A module whose parameters `ranks` store in shards, along the mesh's `axis`, or empty over all that hold the same.

    `tensors`: the names of the parameters. `bytes`: what a rank has of them while they are gathered. `freed`: whether that is given up
    between the passes of a step. `gathers`: how many events gather them, each once a step, or in a task once a call of it.
    `readers`: maps a parameter to the paths of the nodes outside of its own module that read it.
    """

    unit: str
    axis: str
    ranks: Ranks
    tensors: list[str]
    bytes: int = Field(ge=0)
    freed: bool
    gathers: int = Field(ge=0)
    readers: dict[str, list[str]]


class StoredPeak(Record):
    """The most bytes of gathered parameters that one of these ranks has at once; the others have no more."""

    ranks: Ranks
    bytes: int = Field(ge=0)


class StoredRecord(Record):
    """The parameters that ranks store in shards and gather in a program, `ahead` units before their readers."""

    ahead: int = Field(ge=1)
    units: list[StoredUnitRecord]
    peaks: list[StoredPeak]


class FileRecord(Record):
    """What a file of the artifact must be; files of weights have a CRC-32 as well, which a load compares in a third of the time.

    `absent`: there is no such file, since the artifact was compiled without weights; it has no hash.
    `path`: the file is not in the folder; weights are read from this one, and stay in it. `sha256` is then that of its safetensors
    header, empty where it has none, and `modified` the time of its last change in seconds: its contents are not hashed.
    """

    bytes: int
    sha256: str
    crc32: str = ""
    absent: bool = False
    path: str = ""
    modified: str = ""


class SourceRecord(Record):
    """A file that the artifact was compiled from: its name without folder, and its hash."""

    name: str
    sha256: str


class ArtifactRecord(Record):
    """What all programs of an artifact have in common: who wrote it of what, for how many ranks, and the files of all of them.

    `mesh`: by axis its size, where the plan calls all ranks one grid, row-major, the last axis fastest.
    """

    format: Literal[3] = FORMAT
    partc: str
    model: SourceRecord
    plan: SourceRecord | None
    ranks: int = Field(ge=1, le=MOST_RANKS)
    mesh: dict[str, Annotated[int, Field(ge=1)]] = {}
    files: dict[Annotated[str, AfterValidator(inside)], FileRecord]


class Manifest(ArtifactRecord):
    """The index of an artifact as one of its programs needs it: what all have in common, and what is its own.

    `name` is the program's; `is_main`: whether it is the artifact's first, which has the state's first values. `groups`: by name disjoint
    lists of ranks. `state`: what its ranks keep from step to step; `training`: of one that trains; `generation`: of one that makes tokens.
    `stored`: parameters that are gathered.

    Types, shapes and causes of messages stand in rank files, too: a rank reads its own file alone, and must know what the others
    send it, and reports and checks of the whole artifact need not open all files. The checker holds the two against each other.
    """

    name: str = INFER
    is_main: bool = True
    symbols: dict[str, SymbolRecord]
    inputs: list[Port]
    outputs: list[Port]
    transfers: list[Transfer]
    groups: dict[str, list[Ranks]] = {}
    collectives: list[Collective] = []
    rank_files: Programs = []
    state: list[StateRecord] = []
    stored: StoredRecord | None = None
    training: TrainingRecord | None = None
    generation: GenerationRecord | None = None

    @property
    def lacks_weights(self) -> bool:
        """Whether the artifact was compiled without weights: it can be inspected, but not run."""
        return any(record.absent for record in self.files.values())

    def weights_path(self, folder: Path, location: str) -> Path:
        """Returns the file that the external data of a weight names: one in the artifact's folder, or one outside in which weights stay."""
        record = self.files.get(location)
        return Path(record.path) if record is not None and record.path else folder / location

    @property
    def numbers(self) -> dict[int, str]:
        """Maps each number of ranks with compiled programs to its artifact's folder: "" is this one, `r6` is inside of it."""
        inside = [name.removesuffix(f"/{MANIFEST}") for name in self.files if name.endswith(f"/{MANIFEST}")]
        numbers = {
            int(name[1:]): name for name in inside if name[1:].isdecimal() and name == ranks_folder(int(name[1:]))
        }
        return {self.ranks: "", **{ranks: numbers[ranks] for ranks in sorted(numbers, reverse=True)}}

    @property
    def referenced(self) -> dict[str, FileRecord]:
        """The files outside of the folder from which weights are read."""
        return {name: record for name, record in self.files.items() if record.path}

    def state_bytes_of(self, record: StateRecord, rank: int) -> int:
        """Returns the bytes that a rank stores of a tensor from step to step; for a cache with the rows of all groups of slots."""
        dtype = dense(record.type)
        turns = self.generation.groups if record.kind == CACHE and self.generation is not None else 1
        return turns * dtype.bytes_of(record.local_shape(rank)) if dtype is not None else 0

    @property
    def prefix(self) -> str:
        """The prefix of the names of the program's own files: its name, if it is not the main program."""
        return "" if self.is_main else self.name

    @property
    def guard(self) -> str:
        """The guard of the training's record; empty without training."""
        return self.training.guard if self.training is not None else ""

    def program(self, rank: int) -> str:
        """Returns the file of a rank's program."""
        return self.rank_files[rank] if self.rank_files else rank_file(rank, self.prefix)

    def by_file(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Groups these ranks by the file of their program."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.program(rank), []).append(rank)
        return found

    @cached_property
    def messages(self) -> list[Transfer]:
        """The single messages: those between many pairs of ranks share one tag."""
        return one_by_one(self.transfers, self.groups)

    def messages_of(self, rank: int) -> list[Transfer]:
        """Returns the messages that a rank sends or receives, in the order of all messages."""
        return self._messages.get(rank, [])

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Maps each group to the list of ranks that contains this rank; groups without it are left out."""
        return self._lists.get(rank, {})

    _messages = cached_property(lambda self: by_rank(self.messages))
    _lists = cached_property(lambda self: lists_by_rank(self.groups))


@functools.cache
def release() -> str:
    """The installed version: `0.1.0`. Looking it up parses the package's metadata, which takes longer than to write a small rank file."""
    return version("partc")
