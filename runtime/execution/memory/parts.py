"""The parts of the memory that a rank needs on each of its targets, in bytes.

weights             what is read there; a weight counts on every target that reads it
parameters          what is kept from step to step and lies there, statistics included, but for the next
optimizer           the optimizer's tensors, and moving averages of parameters
caches              keys and values of tokens, of a decoder
inputs, outputs     the inputs of a step and the next, in a training of those read ahead, too; outputs of a step and the last
between segments    the arena of the values that segments, copies and messages hand on: exactly the bytes that a rank asks for; of a
                    decoder those of both programs, whose sessions are the same
inside segments     what onnxruntime takes while it runs a segment: an estimate (`program/session_memory.py`)
sessions            what onnxruntime and the runtime hold of every session and node: an estimate, by measurement
messages            slots of messages and rooms of collectives, in memory that ranks of one host share (`shared.py`)
evaluation          `between`, `inside` and `sessions` of the program that evaluates a training, which lies beside it
loading             what onnxruntime needs, besides weights and sessions, to lay out weights of convolutions: an estimate
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ResidentBytes:
    """Bytes that are there from step to step."""

    weights: int = 0
    parameters: int = 0
    optimizer: int = 0
    caches: int = 0
    sessions: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.parameters + self.optimizer + self.caches + self.sessions + self.messages


@dataclass
class StepBytes:
    """Bytes that a step has beside the resident ones."""

    inputs_outputs: int = 0
    between: int = 0
    inside: int = 0
    evaluation: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.inputs_outputs + self.between + self.inside + self.evaluation


@dataclass
class TargetMemory:
    """Bytes that a rank has on one of its targets: from step to step, of a step beside that, and while it loads.

    `unknown`: how many values it leaves out, whose size only a run tells.
    """

    target: str
    resident: ResidentBytes = field(default_factory=ResidentBytes)
    step: StepBytes = field(default_factory=StepBytes)
    loading: int = 0
    unknown: int = 0

    @property
    def peak(self) -> int:
        """What a step holds, or loading where that is more."""
        return self.resident.total + max(self.step.total, self.loading)


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank by target; its segments, and the sessions that run them."""

    rank: int
    segments: int
    sessions: int
    targets: tuple[TargetMemory, ...]

    @property
    def peak(self) -> int:
        """The bytes of all targets together."""
        return sum(one.peak for one in self.targets)

    @property
    def unknown(self) -> int:
        """How many values it leaves out."""
        return sum(one.unknown for one in self.targets)
