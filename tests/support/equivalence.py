"""The one theorem of these tests: what a compiled model gives on all ranks is what the whole model gives."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.checker.check import check_artifact


def model(text: str) -> onnx.ModelProto:
    """A model from ONNX text, checked."""
    proto = onnx.parser.parse_model(text)
    onnx.checker.check_model(proto)
    return proto


def compiled(proto: onnx.ModelProto, plan: str, out: Path, *, check: bool = True) -> Complete:
    """Compiles a model in memory by the text of a plan into `out`; `check`: the compile proves what it has written."""
    source = Source(from_proto(proto, Path("model.onnx")))
    return compile_source(source, parse_plan(plan, "plan.yaml"), out, check=check).program


def counted(program: Complete) -> dict[str, int]:
    """The collectives; a reduction for one rank that reads the result counts like one for all."""
    return dict(
        Counter(event.op_type.replace("AllReduce", "Reduce").replace("Reduce", "AllReduce") for event in program.events)
    )


def whole_outputs(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of the whole model, by one onnxruntime session."""
    session = _session_of(proto.SerializeToString())
    return dict(zip((out.name for out in session.get_outputs()), session.run(None, dict(inputs)), strict=True))


@functools.lru_cache(maxsize=2)
def _session_of(model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def same_as_whole(
    proto: onnx.ModelProto, plan: str, *steps: Mapping[str, Any], rtol: float, atol: float, checked: bool = False
) -> Complete:
    """Runs every step of inputs whole and on in-process ranks and compares all outputs; gives the compiled program.

    `checked`: the checker must accept the artifact, too.
    """
    from partc.runtime import load_local

    with tempfile.TemporaryDirectory() as name:
        program = compiled(
            proto, plan, Path(name) / "build", check=not checked
        )  # the checker proves what a compile does, and more
        assert not checked or "\n".join(map(str, check_artifact(Path(name) / "build"))) == ""
        with load_local(Path(name) / "build", devices={"cuda": "cpu"}) as ranks:
            for inputs in steps:
                want, have = whole_outputs(proto, inputs), ranks(inputs)
                assert set(have) == set(want)
                for output, value in want.items():
                    same(have[output], value, output, rtol, atol)
    return program


def same(have: Any, want: Any, where: str, rtol: float, atol: float) -> None:
    """Compares tensors, sequences and absent optionals; dtype and shape exactly. `atol` is of the largest value, if that is above 1."""
    if want is None or have is None:
        assert have is None, where
        assert want is None, where
    elif isinstance(want, list):
        assert len(have) == len(want), where
        for k, (a, b) in enumerate(zip(have, want, strict=True)):
            same(a, b, f"{where}[{k}]", rtol, atol)
    else:
        a, b = np.asarray(have), np.asarray(want)
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        if b.dtype.kind in "OUSb":
            np.testing.assert_array_equal(a, b, err_msg=where)
        else:
            scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0))) if b.dtype.kind in "fc" else 1.0
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * scale, err_msg=where)
