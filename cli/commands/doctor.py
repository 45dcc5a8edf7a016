"""The command `partc doctor`: what of this machine and installation keeps jobs from running, or from running fast, with remedies."""

from __future__ import annotations

from collections.abc import Iterator

import click
from partc.cli.doctor import machine
from partc.cli.doctor.machine import FAULT, NOTE, Finding
from partc.cli.output import console
from partc.runtime.units import count

CHECKS = (
    machine.python,
    machine.packages,
    machine.cores,
    machine.memory,
    machine.temporary,
    machine.limits,
    machine.providers,
    machine.mpi,
)


@click.command()
def command() -> int:
    """Look for what keeps jobs from running on this machine, or from running fast, and say what to do.

    Looked at are Python and its packages against the lowest versions tested, cores and limits on them, memory, /dev/shm, the temporary
    folder, onnxruntime and GPUs, the MPI library and launcher and whether they match; two ranks are started and meet. It takes
    a few seconds and changes nothing. Exit code 1 if there is a fault; a note is what works, but could be better.

    \b
    partc doctor                # -q: faults and notes alone
    partc doctor --json         # a document for a ticket
    """
    findings: list[Finding] = []
    for check in CHECKS:
        for finding in _findings(check):
            findings.append(finding)
            err = finding.state in (FAULT, NOTE) and console.is_quiet()
            console.echo(f"{finding.state:5} {finding.about}: {finding.text}", err=err)
            if finding.remedy:
                console.echo(f"      help: {finding.remedy}", err=err)
    faults, notes = (sum(one.state == state for one in findings) for state in (FAULT, NOTE))
    console.result({"ok": not faults, "findings": [vars(one) for one in findings]})
    console.echo(f"{count(faults, 'fault')}, {count(notes, 'note')}")
    return int(bool(faults))


def _findings(check: object) -> Iterator[Finding]:
    """What a check finds; a check that fails is a finding, too, so that the others are made."""
    assert callable(check)
    try:
        yield from check()
    except Exception as error:
        yield Finding(
            getattr(check, "__name__", "?"), FAULT, f"could not be looked at: {type(error).__name__}: {error}"
        )
