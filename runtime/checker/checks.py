"""All checks of `partc check`, in order: the law that each proves, the files that it reads, and the checks that must come before.

    FILES      the folder, before any of its files is read
    GRAPH      each rank file by itself
    ACROSS     rank files and the manifest against each other
    TRAINING   the state of ranks, in artifacts that train

A check is a function that returns violations, and one row here. It may rely on the rows that it names as `after`, and is skipped if one of
them has violations; `SOUND` stands for all rows before it, and for the programs inside of the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from partc.runtime.artifact.training.named import carried_code
from partc.runtime.checker.across.bodies import check_bodies
from partc.runtime.checker.across.constants import check_constants
from partc.runtime.checker.across.equal_nodes import check_alike
from partc.runtime.checker.across.ordering import check_order
from partc.runtime.checker.across.orders import check_orders
from partc.runtime.checker.across.places import check_places
from partc.runtime.checker.across.rings import check_rings
from partc.runtime.checker.across.rows import check_microbatches, check_rows
from partc.runtime.checker.across.tree_sums import check_tree_sums
from partc.runtime.checker.files import check_folder
from partc.runtime.checker.graph.nodes import check_graph, check_targets
from partc.runtime.checker.graph.rank_file import check_onnx, check_ranks
from partc.runtime.checker.graph.run_list import check_run_list
from partc.runtime.checker.graph.types import check_types
from partc.runtime.checker.graph.weights import check_weights
from partc.runtime.checker.subject import Subject
from partc.runtime.checker.training.generation import check_generation
from partc.runtime.checker.training.in_place import check_updates
from partc.runtime.checker.training.packed import check_packed
from partc.runtime.checker.training.section import check_training
from partc.runtime.checker.training.slot_rows import check_slots
from partc.runtime.checker.training.state import check_state
from partc.runtime.checker.training.stored import check_stored
from partc.runtime.checker.training.value_numbering import check_copies
from partc.runtime.errors import Violation

FILES, GRAPH, ACROSS, TRAINING = "files", "graph", "across", "training"
SOUND = ("*",)
NO_CODE = "that no code is carried"
RANKS = "whose program each file is"
Run: TypeAlias = Callable[[Subject], Iterable[Violation]]


@dataclass(frozen=True)
class Check:
    """One check: the law that it proves, in the words of messages, the files that it reads, and its function."""

    proves: str
    scope: str
    run: Run
    after: Sequence[str] = ()


CHECKS = (
    Check("the files", FILES, lambda one: check_folder(one.folder, one.manifest)),
    Check("the nodes", GRAPH, lambda one: check_graph(one.file.name, one.file.model)),
    Check(
        "the weights",
        GRAPH,
        lambda one: check_weights(one.folder, one.file.name, one.file.model, one.manifest, one.wrong, one.file.state),
    ),
    Check(RANKS, GRAPH, lambda one: check_ranks(one.file.name, one.file.model, one.manifest)),
    Check("the targets", GRAPH, lambda one: check_targets(one.file.name, one.file.model, one.file.state)),
    Check("ONNX", GRAPH, lambda one: check_onnx(one.file.name, one.file.rest), SOUND),
    Check(
        "the run list",
        GRAPH,
        lambda one: check_run_list(one.folder, one.file.name, one.manifest, one.file.state),
        SOUND,
    ),
    Check("the types", GRAPH, lambda one: check_types(one.file.name, one.file.rest, one.manifest), SOUND),
    Check(NO_CODE, TRAINING, lambda one: carried_code(one.folder, one.manifest)),
    Check("the training", TRAINING, lambda one: check_training(one.manifest, one.models)),
    Check("what ranks keep", TRAINING, lambda one: check_state(one.manifest, one.models)),
    Check("constants by rank", ACROSS, lambda one: check_constants(one.manifest, one.models)),
    Check("the rows of tasks", ACROSS, check_rows),
    Check("the number of microbatches", ACROSS, check_microbatches, ("the rows of tasks",)),
    Check("the order of communication", ACROSS, lambda one: check_order(one.manifest, one.models, one.rows), (RANKS,)),
    Check("updates in place", TRAINING, check_updates, ("what ranks keep",)),
    Check("how stored parameters are gathered", TRAINING, check_stored, SOUND),
    Check("the generation", TRAINING, check_generation, ("what ranks keep",)),
    Check("that slots keep apart", TRAINING, check_slots, SOUND),
    Check("the bodies of branches and loops", ACROSS, lambda one: check_bodies(one.manifest, one.models), SOUND),
    Check(
        "that shards fit and partial values are reduced",
        ACROSS,
        lambda one: check_places(one.manifest, one.models),
        SOUND,
    ),
    Check("the order of sums over parts", ACROSS, lambda one: check_tree_sums(one.manifest, one.models), SOUND),
    Check(
        "the other programs", TRAINING, lambda one: (found for name in one.others for found in one.check_beside(name))
    ),
    Check("messages of few bits", TRAINING, lambda one: check_packed(one.manifest, one.models), SOUND),
    Check("the hops of rings", ACROSS, check_rings, SOUND),
    Check("the order of tokens", ACROSS, lambda one: check_orders(one.manifest, one.models), SOUND),
    Check("that copies stay equal", TRAINING, check_copies, SOUND),
    Check("that nodes of one name are one", TRAINING, check_alike, SOUND),
)
