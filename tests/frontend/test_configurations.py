"""Configurations of `transformers`: every class is read without an error, and by one module."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.huggingface import settings as configuration
from partc.compiler.frontend.huggingface.flat_cache import start_tokens
from partc.compiler.frontend.huggingface.ports import position_symbols, usual_inputs
from partc.compiler.frontend.torch.torch_module import quiet

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)
FOLDER = Path(configuration.__file__).parent


@pytest.fixture(scope="module")
def configurations() -> list[Any]:
    """One of each class that can be made without arguments."""
    found = []
    for name in (name for name in dir(transformers) if name.endswith("Config")):
        kind = getattr(transformers, name)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig):
            try:
                with quiet():
                    found.append(kind())
            except Exception:
                assert name in ("Gemma4AssistantConfig", "NougatConfig")  # whose defaults do not fit one another
    return found


def _forward(
    input_ids: Any, attention_mask: Any, labels: Any, pixel_values: Any, input_features: Any, decoder_input_ids: Any
) -> None: ...


@pytest.mark.parametrize(("generates", "main"), [(True, "input_ids"), (False, "input_ids"), (False, "pixel_values")])
def test_every_configuration_is_read(configurations: list[Any], generates: bool, main: str) -> None:
    for config in configurations:
        module = SimpleNamespace(
            config=config, forward=_forward, main_input_name=main, can_generate=lambda: generates, modules=tuple
        )
        with quiet():
            before = getattr(config, "pad_token_id", None)
            try:
                inputs = usual_inputs(module, ["labels", main], "model")
                usual_inputs(module, ["input_features"], "model")
            except CompileError:  # the shape of images or of features is not known
                inputs = {}
            position_symbols(module, inputs)
            start_tokens(module)
            with configuration.no_padding(config):
                assert vars(config)["pad_token_id"] is None
            assert getattr(config, "pad_token_id", None) == before
    assert len(configurations) > 300


def test_one_module_reads_attributes() -> None:
    reads = re.compile(
        r"config\.(?!json\b|use_cache = )[a-z_]+\b(?!\()|getattr\([\w.]*config\b|hasattr\([\w.]*config\b"
    )
    found = {path.name: reads.findall(path.read_text()) for path in FOLDER.glob("*.py") if path.name != "settings.py"}
    assert not {name: texts for name, texts in found.items() if texts}, "use configuration.attribute"


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("ResNetForImageClassification", "pixel_values", ["batch", 3, 224, 224]),
        ("SiglipForImageClassification", "pixel_values", ["batch", 3, 224, 224]),
        ("ASTForAudioClassification", "input_values", ["batch", 1024, 128]),
        ("Wav2Vec2ForSequenceClassification", "input_values", ["batch", "samples"]),
        ("BartForSequenceClassification", "input_ids", ["batch", "sequence"]),
    ],
)
def test_inputs_of_classifiers(kind: str, name: str, shape: list[Any]) -> None:
    """A classifier with a decoder makes the decoder's tokens itself; the first frames of a sound need some samples."""
    family = getattr(transformers, kind)
    module: Any = type(kind, (), {"forward": family.forward, "can_generate": lambda self: False, "modules": tuple})()
    module.config, module.main_input_name = family.config_class(), family.main_input_name
    inputs = usual_inputs(module, None, "model")
    assert [*inputs] == [name, *(["attention_mask"] if name == "input_ids" else [])]
    assert [*inputs[name].shape] == shape
    symbols = position_symbols(module, inputs)
    assert "samples" not in shape or symbols["samples"].min == 720
