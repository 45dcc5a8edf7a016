"""A label that is no class and not ignored is refused before anything runs, by all ranks, with its input and its record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from batch_in_parts import LABELLED, LOSSES, NET, OWN_LOSS, PLANS, WEIGHTS, numbers, train
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import InputError, load_local, load_trainer
from partc.runtime.communication.in_process import LocalWorld
from training_equivalence import fed, from_text


@pytest.mark.parametrize(("ranks", "name"), [(1, "mean"), (2, "mean"), (2, "both, smoothed"), (4, "ignored")])
def test_a_label_that_is_no_class(ranks: int, name: str, tmp_path: Path) -> None:
    plan = PLANS[ranks].replace("DATA", "label: [dp]") + train(LOSSES[name], 1)
    compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    given = numbers(LOSSES[name])
    with load_local(tmp_path / "build") as program:
        inputs = {**fed(program, 0), **given}
        assert np.isfinite(float(np.asarray(program(inputs)["loss"])))
        law = "labels are 0 to 4" + (", or -1, which does not count" if "ignore_index" in LOSSES[name] else "")
        for number in (-1, 5, -7):
            inputs["label"] = np.where(np.arange(16) == 11, number, given["label"])
            if number == -1 and "ignore_index" in LOSSES[name]:
                assert np.isfinite(float(np.asarray(program(inputs)["loss"])))
                continue
            told = rf"input 'label': record 11 of the batch has the label {number}\n  {law}\n"
            with pytest.raises(InputError, match=told):
                program(inputs)
            program({**inputs, **given})


def test_a_label_of_a_loss_of_the_models_own_and_of_a_part(tmp_path: Path) -> None:
    text = OWN_LOSS.replace("ENTROPY", LABELLED["entropy"])
    compile_source(from_text(text, {"w": (6, 5)}), parse_plan(PLANS[1] + train("loss", 4), "plan.yaml"), tmp_path / "b")
    given = {**numbers(LOSSES["ignored"])}
    given["label"][13] = 5
    with load_trainer(tmp_path / "b", LocalWorld(1).transport(0), threads=1) as trainer:
        with pytest.raises(InputError, match=r"input 'label': record 13 of the batch has the label 5"):
            trainer.train(given)
        batches = [({**given, "label": given["label"] % 5}, 16), (given, 16)]
        with pytest.raises(
            InputError, match=r"^evaluation after step 0, batch 1: input 'label': record 13 of the batch"
        ):
            trainer.evaluate(batches)
        given["label"][13] = 4
        trainer.train(given)
