"""The runtime: loads an artifact and runs it, one rank of a job or all ranks in one process. `README.md` has its laws.

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import ArtifactError, InputError, NonFiniteError, PartcError, RankError, StepError, UsageError

if TYPE_CHECKING:
    from .artifact.manifest import Artifact, open_artifact
    from .execution.in_process import LocalProgram, load_local
    from .execution.inputs import Whole
    from .execution.program import Program, load
    from .execution.rank_program import describe_action
    from .generation.batch import ContinuousBatch
    from .generation.generator import Generator, load_generator, load_local_generator
    from .generation.request import Request
    from .training.load import load_trainer
    from .training.trainer import Trainer

_HOMES = {
    "Artifact": "artifact.manifest",
    "open_artifact": "artifact.manifest",
    "LocalProgram": "execution.in_process",
    "Whole": "execution.inputs",
    "Program": "execution.program",
    "describe_action": "execution.rank_program",
    "Trainer": "training.trainer",
    "load": "execution.program",
    "load_local": "execution.in_process",
    "load_trainer": "training.load",
    "ContinuousBatch": "generation.batch",
    "Generator": "generation.generator",
    "Request": "generation.request",
    "load_generator": "generation.generator",
    "load_local_generator": "generation.generator",
}

__all__ = [
    "Artifact",
    "ArtifactError",
    "ContinuousBatch",
    "Generator",
    "InputError",
    "LocalProgram",
    "NonFiniteError",
    "PartcError",
    "Program",
    "RankError",
    "Request",
    "StepError",
    "Trainer",
    "UsageError",
    "Whole",
    "describe_action",
    "load",
    "load_generator",
    "load_local",
    "load_local_generator",
    "load_trainer",
    "open_artifact",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Returns all public names, including those that are not imported yet, so that notebooks complete them."""
    return sorted({*globals(), *__all__})
