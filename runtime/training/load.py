"""Loads the training of an artifact: its training program, its evaluation, and the learning rates of its schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.artifact.training.lr_schedule import Rate, Run, rate_of
from partc.runtime.artifact.training.named import SCHEDULE, base_folder, outside, refusal

from ..artifact.format import TrainingRecord
from ..artifact.manifest import Artifact, open_artifact
from ..checkpoint.early_verification import EarlyVerification
from ..communication.transport import Transport
from ..devices.devices import RequestedDevices
from ..errors import UsageError
from ..execution.program import OnError, Program, load
from ..user_code import run_file
from .trainer import Evaluation, Trainer

if TYPE_CHECKING:
    from mpi4py import MPI


def load_trainer(
    folder: str | Path,
    comm: MPI.Intracomm | Transport | None = None,
    *,
    rate: Rate | None = None,
    ahead: str | Path | None = None,
    trust_code: bool = False,
    threads: int | None = None,
    trust: bool = False,
    stall: float = 30.0,
    on_error: OnError = "raise",
    devices: RequestedDevices | None = None,
    op_times: Path | None = None,
) -> Trainer:
    """Loads this rank's trainer of the artifact in `folder`; collective over `comm`, by default MPI.COMM_WORLD.

    `rate` returns the learning rate of a step, counted from 0, in place of the plan's schedule. `ahead` is the checkpoint, or the folder of
    checkpoints, that will be loaded next: hashing it begins at once. `trust_code`: a schedule in a Python file that the artifact names may
    run. `devices` and `op_times` are as for `load`. UsageError for an artifact without training, or with such a schedule where neither
    `rate` nor `trust_code` is given.
    """
    place = Path(folder)
    try:
        artifact, rate = _opened(place, rate, trust_code)
    except Exception as error:
        load(place, comm, stall=stall, first=partial(_raise, error))  # so that the other ranks do not wait for this one
        raise
    begun = None
    if ahead is not None and (comm is not None or artifact.manifest.ranks == 1):
        begun = EarlyVerification(Path(ahead), comm.rank if comm is not None else 0, artifact.manifest.ranks)
    program: Program | None = None
    try:
        program = load(
            place,
            comm,
            threads=threads,
            trust=trust,
            stall=stall,
            on_error=on_error,
            devices=devices,
            op_times=op_times,
        )
        evaluation = Evaluation.beside(program)
        artifact.refuse_replaced()
        return Trainer(program, evaluation, rate, begun)
    except BaseException as error:
        if begun is not None:
            begun.close()
        if program is not None:
            program.__exit__(type(error), error, error.__traceback__)
        raise


def _opened(place: Path, rate: Rate | None, trust_code: bool) -> tuple[Artifact, Rate]:
    """Opens the artifact and chooses its learning rate, which a trainer needs before its program is loaded."""
    artifact = open_artifact(place, trust=True)
    manifest = artifact.manifest
    record = manifest.training
    if record is None:
        raise UsageError(
            f"{place}: the artifact has no training program\n  help: compile it with a plan that has `train:`"
        )
    if rate is None:
        if not trust_code and (found := outside(place, record, (SCHEDULE,))):
            raise refusal(place, manifest, found, "give `rate`, or `trust_code=True` where the artifact is yours")
        rate = planned_rate(record, base_folder(place, record))
    return artifact, rate


def _raise(error: Exception) -> None:
    raise error


def planned_rate(record: TrainingRecord, base: Path, run: Run = run_file) -> Rate:
    """Returns a plan's schedule as a function of the step; a Python file of it, relative to `base`, is run at once, by `run`."""
    return rate_of(record.settings.schedule, record.optimizer.lr, "schedule", base, run)
