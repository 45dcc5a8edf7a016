"""A few seconds of some kinds of fuzzing, of others the next day; many minutes by `python tests/fuzz/plans.py --minutes N --seed S`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rows import of_today

FOLDER = Path(__file__).parent
REFUSED = r"{} cases: (\d+ ok(, )?)?(\d+ refused)?"
GIVEN = {
    "plans --cases 4 --seed 7": REFUSED.format(4),
    "schema_plans --cases 3 --seed 1": REFUSED.format(3),
    "models --cases 4 --seed 7": REFUSED.format(4),
    "manifests --cases 4 --seed 7": REFUSED.format(4),
    "rank_files --cases 2 --seed 7": REFUSED.format(2),
    "checkpoints --cases 1 --seed 7": REFUSED.format(1),
    "bombs --cases 2 --seed 7": REFUSED.format(2),
}
"""Scripts that give a command what is wrong, and what each says at its end."""
COMPARED = {
    "random_pipelines --cases 1 --seed 3": "1 cases: 1 ok",
    "random_targets --cases 1 --seed 5": "1 cases: 1 ok",
    "random_masks --cases 1 --seed 1": "1 cases: 1 ok",
    "random_lanes --cases 1 --seed 3": "1 cases: 1 ok",
    "random_streams --cases 1 --seed 1": "1 cases: 1 ok",
    "random_lookups --cases 1 --seed 1": "1 cases, 0 wrong",
    "random_experts --cases 1 --seed 8": "1 cases, 0 wrong",
    "random_generation --cases 1 --seed 3": "1 cases: 1 equal, 0 refused, 0 wrong",
    "random_requests --requests 40 --seed 1": r"40 requests: \d+ equal, \d+ left, \d+ refused$",
    "random_precision 1 --seed 1": r"\{'equal': 1\}",
    "random_tables 1 --seed 1": "1 equal",
    "random_bodies 2 11 --cut": "2 models, 0 wrong",
    "random_ops --cases 12 --seed 1": r"12 cases: \d+ ok",
    "same_bits --only gpt --steps 2 --ranks 2,1": "1 models, 2 trainings of each, 0 with other bits",
    "schemas --cases 60 --seed 71": r"60 cases: \d+ valid, \d+ refused",
}
"""Scripts that compare random models with one rank."""
KNOWN = {
    "expert_faults --cases 6 --seed 1": r"(\d+) of \1 faults found",
    "semantic_mutants 6 --only generation": "2 of 3 mutants that give other numbers refused",
    "stored_faults --cases 6 --seed 1 --only freed": "6 faults: 6 named, 0 not named, 0 missed",
    "pipeline_models --models mlp --microbatches 2 --steps 1 --most 4": "4 cases, 0 differ",
}
"""Scripts about known models, and every op."""
OVER_MPI = {
    "saving --kills 1": "1 kills .* files that differ: none",
    "restarts --failures 1 --seed 3": "[1-3] failures .* 0 wrong; .* a mistake ended it",
    "hostile_clients --seconds 1 --only all --late 0 --in-process": "all .* attacks .* 0 wrong",
    "kills --cases 1 --seed 326 --only run --start 8": "1 cases, 0 wrong",
    "early_signals --count 4 --seed 2 --within 1.5 --only train,run,serve,compile": "4 signals, 0 wrong",
    "little_memory --from 240 --to 400 --step 80 --only run,compile": "6 commands, 0 wrong",
}
"""Scripts that start jobs."""
ELSEWHERE = {
    "every_strategy": "fuzz/test_every_strategy.py",
    "keys_together": "training/plans/test_keys_together.py",
    "mutations": "checker/test_check_mutations.py",
    "planted_differences": "frontend/test_compare_with_torch.py",
    "random_annotations": "annotations/test_random_annotations.py",
    "random_bodies": "sharding/test_unrolled_bodies.py",
    "random_cases": "sharding/test_random_cases.py",
}
"""Scripts whose cases another test runs."""
WRONG_ONCE = (
    "random_pipelines --seed 700100 --case 90",  # one group keeps what another computes again, and `partc check` refused it
    "random_pipelines --seed 21 --case 27",  # a rank hands on, within a task, what the stage's own ranks read again
    "random_pipelines --seed 31 --case 183",  # auto splits the backward passes of some microbatches
    "random_pipelines --seed 77 --case 13",  # the number of positions that a loss is divided by was that of one microbatch
    "random_pipelines --seed 31 --case 402",  # the gradient of a loss is once a step, and no forward op to repeat
)


def in_turn(all_scripts: dict[str, str], count: int) -> None:
    """Runs as many scripts as a day has in one process; each ends well and says what it should."""
    scripts = {script: all_scripts[script] for script in of_today([*all_scripts], count)}
    asked = [sys.executable, str(FOLDER / "in_turn.py"), *scripts]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = re.split(r"^--- \w+\n", ended.stdout, flags=re.MULTILINE)[1:]
    for (script, wanted), found in zip(scripts.items(), told, strict=True):
        assert re.search(rf"^\s*{wanted}", found, re.MULTILINE), f"{script}\n{found}"


def test_whatever_is_given_ends_well_and_known_models_are_as_the_whole() -> None:
    in_turn(GIVEN | KNOWN, 2)


def test_random_models_are_as_the_whole() -> None:
    in_turn(COMPARED | dict.fromkeys(WRONG_ONCE, "ok$"), 4)


@pytest.mark.skipif(
    sys.platform != "linux" or not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="reads /proc, and the environment needs an mpiexec of its own",
)
def test_jobs_over_mpi_end_as_they_should() -> None:
    in_turn(OVER_MPI, 1)


def test_every_script_is_run() -> None:
    """A script that no test runs may be broken for days."""
    scripts = {path.stem for path in FOLDER.glob("*.py") if "\nif __name__ ==" in path.read_text()}
    run = {line.split()[0] for line in (*GIVEN, *COMPARED, *KNOWN, *OVER_MPI)}
    here = {"in_turn", "random_torch", "torch_semantics", "decoder_families", "torch_extremes"}
    assert scripts == run | here | ELSEWHERE.keys()
    for script, test in ELSEWHERE.items():
        assert script in (FOLDER.parent / test).read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", range(2))
def test_random_trainings_are_as_those_of_torch(case: int) -> None:
    """In this process, where torch's exporter is often loaded already."""
    torch = pytest.importorskip("torch", reason="random_torch.py compares with torch")
    import pool
    from random_torch import work

    threads = torch.get_num_threads()
    try:
        assert pool.one_case(work, 3, case) == ("ok", "")
    finally:
        torch.set_num_threads(threads)


EQUAL = (
    "Embedding(padding_idx=-9), from the end",
    "EmbeddingBag(sum, padding_idx=0)",
    "cross_entropy(label_smoothing, weight, ignore_index)",
    "cross_entropy of probabilities",
    "gaussian_nll_loss, variance below eps",
    "parametrizations.weight_norm",
    "parametrizations.spectral_norm.eval()",
    "a vector times a transposed matrix",
    "detach_",
    "no_grad, inference_mode, enable_grad",
    "checkpoint(use_reentrant=True)",
    "hardtanh",
    "max(dim) of equal values",
)
TOLD = (
    "Embedding(scale_grad_by_freq=True)",
    "Embedding(max_norm=1)",
    "InstanceNorm1d(track_running_stats=True)",
    "parametrizations.spectral_norm",
    "a hook of a tensor, without a question",
    "Parameter.register_hook",
    "Module.register_full_backward_hook",
    "a running center, assigned anew",
    "a counter",
    "a counter that is a number",
    "a weight clipped by forward",
    "clamp_ in no_grad",
    "Tensor.data.clamp_",
    "an autograd.Function",
)


@pytest.mark.filterwarnings("ignore")
def test_special_cases_of_torch_are_equal_or_refused_by_name(tmp_path: Path) -> None:
    """Those that are equal as one module, and as another those that are refused, all at once."""
    pytest.importorskip("torch", reason="torch_semantics.py compares with torch")
    from torch_cases import REFUSED
    from torch_semantics import ends

    assert ends(EQUAL, tmp_path / "equal") == dict.fromkeys(EQUAL, "equal")
    (text,) = {*ends(TOLD, tmp_path / "refused").values()}
    assert text.startswith("refused: ")
    assert [name for name in TOLD if REFUSED[name] not in text] == []


@pytest.mark.filterwarnings("ignore")
def test_functions_of_torch_at_extremes_are_as_in_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from torch_extremes import main

    names = "amax log1p expm1 F.logsigmoid logaddexp atan2 // fmax median sigmoid"
    main(["--only", *names.split()])
    assert capsys.readouterr().out.endswith("10 functions, 0 not as in the guide\n")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "layout"),
    of_today([("Falcon", "2 slots"), ("Marian", "2 slots"), ("DeepseekV3", "tp 2"), ("Llama4", "2 slots")], 1),
)
def test_a_family_makes_the_tokens_of_transformers(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon: one head of keys, and heads that literals index, made tensors without numbers. Marian: rows of positions without a batch.

    DeepSeek-V3: heads are made of the cache, cut without a warning; a buffer, the experts' bias, has its numbers in the folder's file.
    Llama 4 has complex rotary positions, and a temperature by position.
    """
    pytest.importorskip("transformers", "5.0", reason="decoder_families.py compares with transformers")
    from decoder_families import FAMILIES, rows

    monkeypatch.setitem(
        FAMILIES, "Falcon", {**FAMILIES["Falcon"], "num_hidden_layers": 1}
    )  # torch exports a layer in 10 s
    assert [*rows(family, [layout], tmp_path)] == [(layout, "equal")]
