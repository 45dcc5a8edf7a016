"""The entry of the command `partc`: its list of commands, and the handling of errors.

A command's module is imported when the command runs, so that `partc --help` and a wrong option respond at once. An error
made for the user prints its text and no traceback; any other error is reported as a bug in partc.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click
from partc.cli.interruption import Stopped, of_interrupt, run, swallowed
from partc.cli.output import console
from partc.cli.output.console import add_options
from partc.cli.output.failures import report

_NO_READER = 141
_COMPLETION = "_PARTC_COMPLETE"

COMMANDS = {
    "export": "Write a model as an .onnx file, so that torch exports it once.",
    "compile": "Compile a model and a plan into one program per rank.",
    "run": "Run an artifact over MPI, or in this process.",
    "train": "Train an artifact over MPI, or in this process.",
    "eval": "Evaluate a trained model.",
    "generate": "Continue prompts with a decoder.",
    "serve": "Answer requests for completions over HTTP.",
    "checkpoint": "Show, verify and export checkpoints.",
    "verify": "Compare the compiled model with the unsharded model.",
    "check": "Check an artifact from its files alone.",
    "inspect": "Show nodes, memory and communication of each rank.",
    "diff": "Show what changed between two artifacts.",
    "report": "Write a page that shows an artifact, alone or beside another one.",
    "simulate": "Show the time and memory of a step on a machine, or of a pipeline schedule.",
    "measure": "Measure this machine, for simulate.",
    "profile": "Show where the time of a trace went.",
    "plan": "Write a starting plan for a model.",
    "schema": "Print the JSON schema of a plan.",
    "ops": "Show how each op can be sharded.",
    "cache": "Show or remove the exports that are kept.",
    "doctor": "Look for what keeps jobs from running here.",
}
_HOMES = {"schema": "plan", "measure": "profile"}


class LazyGroup(click.Group):
    """A group whose commands are modules of this package, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which a user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command's object, or None where there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"partc.cli.commands.{_HOMES.get(cmd_name, cmd_name)}")
        command = getattr(module, cmd_name if cmd_name in _HOMES else "command")
        assert isinstance(command, click.Command)
        add_options(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from importlib.metadata import version

        console.echo(f"partc {version('partc')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
def partc() -> None:
    """Compile a model and a plan into one ONNX program per rank, and run it over MPI.

    \b
    partc plan model.onnx -o plan.yaml           # a plan to edit
    partc compile model.onnx --plan plan.yaml    # writes build/
    partc run --input x.npz -o y.npz             # runs build/ on its ranks
    """


def main() -> None:
    """The entry of a process that does not start in `__main__`, which would install signal handlers before any import."""
    run(invoke)


def invoke(arguments: Sequence[str]) -> int:
    """Runs `partc ARGUMENTS`, prints its error, if any, and returns the exit code."""
    console.begin(arguments)
    code = _invoke(arguments)
    console.end(code)
    return code


def _invoke(arguments: Sequence[str]) -> int:
    try:
        if _COMPLETION in os.environ:
            partc.main(list(arguments), prog_name="partc", complete_var=_COMPLETION)
        # not by `partc.main`, which ends the process where its output has no reader, and loses the reason of an interrupt
        with partc.make_context("partc", list(arguments)) as ctx:
            code = partc.invoke(ctx)
        if sys.stdout is not None:
            sys.stdout.flush()
        if came := swallowed():
            return _ended(came)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        console.failed(error.format_message())
        console.echo(shown.getvalue(), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        return _ended(of_interrupt(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except Exception as error:
        # a library that is interrupted while it is loaded raises an ImportError instead
        return _ended(came) if (came := swallowed()) else report(error)


def _ended(stopped: Stopped) -> int:
    """Prints the reason why the command was stopped; returns its exit code."""
    with contextlib.suppress(OSError):  # the terminal may have gone
        console.failure(str(stopped))
    return stopped.exit_code
