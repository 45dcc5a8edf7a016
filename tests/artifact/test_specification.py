"""The specification of the artifact, `runtime/README.md`, has every key of the manifest and every op and attribute of `partc.comm`."""

from __future__ import annotations

import re
from pathlib import Path

import onnx.defs
import pytest
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.format import DOMAIN, Collective, LayoutRecord, SymbolRecord, TensorRecord
from partc.runtime.artifact.generation import EmbeddingRecord, EncoderRecord, GenerationRecord
from partc.runtime.artifact.graph.bodies import BORDERS
from partc.runtime.artifact.manifest_file import ManifestFile, ProgramRecord
from partc.runtime.artifact.port import IdsRecord, LabelRecord, Law, Port, Transfer
from partc.runtime.artifact.training.scalars import SCALARS, OptimizerRecord
from partc.runtime.artifact.training.training_record import TrainingRecord
from pydantic import BaseModel

TEXT = (Path(__file__).parents[2] / "runtime/README.md").read_text()
ARTIFACT = TEXT[TEXT.index("## The artifact") : TEXT.index("### Replacing")]
WORDS = {*re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`|^    .*$|^\| `.*$", ARTIFACT, re.MULTILINE)))}
"""Words in code, and in rows of tables about code."""
RECORDS: list[type[BaseModel]] = [
    *(ManifestFile, ProgramRecord, SymbolRecord, Port, LabelRecord, IdsRecord, Transfer, Collective, LayoutRecord),
    *(TensorRecord, Law, TrainingRecord, OptimizerRecord, GenerationRecord, EncoderRecord, EmbeddingRecord),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_key_of_the_manifest_is_specified(record: type[BaseModel]) -> None:
    assert not {*record.model_fields} - WORDS


def test_every_node_of_communication_is_specified() -> None:
    register()
    schemas = [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == DOMAIN]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", ARTIFACT, re.MULTILINE))
    assert len(schemas) >= 12
    assert {*BORDERS} <= WORDS  # which no file has: it has the standard's node
    for schema in schemas:
        if schema.name in BORDERS:
            continue
        named = {*re.findall(r"`(\w+)`", rows[schema.name])}
        assert not {*schema.attributes} - named, schema.name


def test_every_scalar_is_specified() -> None:
    paragraph = TEXT[TEXT.index("**Scalars.**") : TEXT.index("| `settings.schedule` |")]
    assert {*SCALARS} <= {*re.findall(r"`(\w+)`", paragraph)}
