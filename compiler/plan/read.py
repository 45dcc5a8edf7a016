"""A plan file to a `Plan`: everything that is wrong with it is said at once, each with its line.

plan.yaml:7: placement of 'conv9': rank 5, but there are 5 ranks
  help: choose a rank from 0 to 4, or set 'ranks' to at least 6
"""

from __future__ import annotations

from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.document import Data, Document, parse_document, read_text
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.rules import InputRule, OutputRule, PlacementRule, Plan, SymbolRule
from partc.compiler.plan.schema import LATER, PlanEntries, SymbolEntry, Violation, shown
from pydantic import ValidationError
from pydantic_core import ErrorDetails

__all__ = ["InputRule", "OutputRule", "PlacementRule", "Plan", "SymbolRule", "parse_plan", "read_plan"]

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping, 'key: value' on each line",
    "model_type": "a mapping, 'key: value' on each line",
    "model_attributes_type": "a mapping, 'key: value' on each line",
    "list_type": "a list",
}


def read_plan(path: Path) -> Plan:
    """The plan of a file; CompileError with all problems, their lines under the path as it is given."""
    return parse_plan(read_text(path), str(path))


def parse_plan(text: str, name: str) -> Plan:
    """The plan of a YAML text that messages call `name`; CompileError with all problems in the order of their lines."""
    document = parse_document(text, name)
    problems = list(document.problems)
    entries: PlanEntries | None = None
    if not isinstance(document.data, dict):
        what = (
            "the plan is empty" if document.data is None else f"a plan is a mapping, but this is {shown(document.data)}"
        )
        problems.append(Problem(document.where(), what, help="begin with 'ranks: 2'"))
    else:
        try:
            entries = PlanEntries.model_validate(document.data, context={"ranks": _ranks(document.data)})
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += (_problem(detail, document) for detail in details if detail["loc"] not in document.refused)
    if problems or entries is None:
        raise CompileError(sorted(problems, key=lambda problem: int(problem.where.rpartition(":")[2])))
    return Plan(
        file=name,
        ranks=entries.ranks,
        symbols={
            symbol: SymbolRule(entry.symbol(), document.where("symbols", symbol))
            for symbol, entry in entries.symbols.items()
        },
        inputs={
            value: InputRule(tuple(dims), document.where("inputs", value)) for value, dims in entries.inputs.items()
        },
        placement=tuple(
            PlacementRule(pattern, rank, document.where("placement", pattern))
            for pattern, rank in entries.placement.items()
        ),
        outputs=tuple(
            OutputRule(pattern, ranks, document.where("outputs", pattern)) for pattern, ranks in entries.outputs.items()
        ),
    )


def _ranks(data: dict[str, Data]) -> int | None:
    """The number of ranks that ranks are checked against; None where the plan does not say it rightly."""
    ranks = data.get("ranks")
    return ranks if isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1 else None


def _problem(detail: ErrorDetails, document: Document) -> Problem:
    """A problem in the plan's words from what pydantic found."""
    steps = tuple(step for step in detail["loc"] if step != "[key]")
    kind, context = detail["type"], detail.get("ctx", {})
    where, subject = document.where(*steps), _subject(steps)
    violation = context.get("error")
    if isinstance(violation, Violation):
        at = (*steps, violation.key) if violation.key else steps
        return Problem(document.where(*at), f"{subject}: {violation.fact}", violation.law, violation.help)
    if kind == "extra_forbidden":
        return _unknown(where, steps)
    if kind == "missing":
        return Problem(document.where(), "'ranks' is missing", help="begin with the number of ranks, 'ranks: 2'")
    if kind == "greater_than_equal":
        return Problem(where, f"{subject}: expected at least {context['ge']}, but got {detail['input']}")
    if kind in _EXPECTED:
        return Problem(where, f"{subject}: expected {_EXPECTED[kind]}, but got {shown(detail['input'])}")
    return Problem(where, f"{subject}: {detail['msg']}")


def _unknown(where: str, steps: tuple[str | int, ...]) -> Problem:
    key = str(steps[-1])
    if len(steps) == 1 and key in LATER:
        return Problem(where, f"'{key}' is not in this version of partc, which has placement only", help="take it away")
    keys = list(PlanEntries.model_fields if len(steps) == 1 else SymbolEntry.model_fields)
    near = nearest(key, keys, 1)
    remedy = f"the nearest is '{near[0]}'" if near else f"the keys here are {', '.join(keys)}"
    around = "" if len(steps) == 1 else f"{_subject(steps[:-1])}: "
    return Problem(where, f"{around}unknown key '{key}'", help=remedy)


def _subject(steps: tuple[str | int, ...]) -> str:
    """What a path of the plan speaks of: `placement of 'conv1'`, `input 'x', dim 2`."""
    match steps:
        case ("symbols", name):
            return f"symbol '{name}'"
        case ("symbols", name, key):
            return f"symbol '{name}', '{key}'"
        case ("inputs", name):
            return f"input '{name}'"
        case ("inputs", name, index):
            return f"input '{name}', dim {index}"
        case ("placement", pattern):
            return f"placement of '{pattern}'"
        case ("outputs", pattern):
            return f"delivery of '{pattern}'"
        case _:
            return "'" + ".".join(str(step) for step in steps) + "'"
