"""GPUs of this machine, and whether onnxruntime can use them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from partc.cli.doctor.finding import FAULT, NOTE, OK, Finding, output_of
from partc.runtime.devices.devices import gpus
from partc.runtime.units import count

_ASK = """
import json, onnxruntime
onnxruntime.set_default_logger_severity(4)
{preload}
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
used, error = [], ""
try:
    used = onnxruntime.InferenceSession(model.SerializeToString(), providers=["{provider}"]).get_providers()
except Exception as problem:
    error = (str(problem).splitlines() or [""])[0]
known = onnxruntime.get_available_providers()
print(json.dumps({"version": onnxruntime.__version__, "known": known, "used": used, "error": error}))
"""
_START = 60.0
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_LIBRARIES = "pip install onnxruntime-gpu[cuda,cudnn], or CUDA and cuDNN of the versions that it needs"


def providers() -> Iterator[Finding]:
    """Whether onnxruntime loads, which providers it has, and whether a session begins on the GPUs that the system has."""
    there = gpus()
    wanted = _CUDA if there else _CPU
    program = _ASK.replace("{provider}", wanted).replace("{preload}", "onnxruntime.preload_dlls()" if there else "")
    good, text = output_of([sys.executable, "-P", "-c", program], _START)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        remedy = "pip install --force-reinstall onnxruntime-gpu, or onnxruntime where there is no such wheel"
        yield Finding("onnxruntime", FAULT, f"it cannot be loaded: {text}", remedy)
        return
    found = json.loads(lines[-1])
    begins = wanted in found["used"]
    if begins or wanted == _CUDA:
        yield Finding("onnxruntime", OK, f"{found['version']}, {', '.join(found['known'])}")
    else:
        yield Finding("onnxruntime", FAULT, f"no session begins: {found['error']}", "reinstall onnxruntime")
    if there and not begins:
        has = _CUDA in found["known"]
        why = f"a session does not begin there: {found['error'] or 'its libraries are missing'}"
        text = f"{count(there, 'GPU')}; " + (why if has else f"onnxruntime has no {_CUDA}")
        remedy = _LIBRARIES if has else "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
        yield Finding("GPU", NOTE, text, f"{remedy}; until then run with --device cuda=cpu")
    else:
        yield Finding(
            "GPU", OK, f"{count(there, 'GPU')} usable" if there else "none; --device cuda=cpu stands in for one"
        )
