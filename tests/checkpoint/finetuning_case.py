"""Fine-tuning a small Llama by transformers' own Trainer and by partc: AdamW without decay of norms, cosine with warmup, clipping,
accumulation, and labels that do not count.

    case = FineTuning(folder, steps=50)      the model, its data, and an artifact for each plan
    case.trainer()                           losses and weights of the Trainer
    case.partc("tp", 50, "dp")               those of a plan, from the checkpoint of another
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest

BATCH, LENGTH, TOKENS, WARMUP = 8, 12, 48, 2
TENSOR = "".join(
    f'  "model.layers.*.{name}": {style}\n'
    for style, names in {
        "colwise": "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
        "rowwise": "self_attn.o_proj mlp.down_proj",
    }.items()
    for name in names.split()
)
STAGES = "placement: {model.embed_tokens: 0, model.layers.0: 0, model.layers.1: 1, model.norm: 1, lm_head: 1}\n"
PLANS = {
    "dp": "mesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n",
    "tp": f"sharding:\n  model.embed_tokens: rowwise\n  lm_head: colwise\n{TENSOR}",
    "1f1b": f"{STAGES}pipeline: {{microbatches: 2, schedule: 1f1b}}\nsymbols: {{batch: {{divisor: 2}}}}\n",
}


class FineTuning:
    """The model as a Hugging Face folder, `steps` batches of data, and the artifacts of the plans in `folder`."""

    def __init__(self, folder: Path, steps: int, plans: Mapping[str, str] = PLANS) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.folder, self.steps = folder, steps
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "llama")
        random = np.random.default_rng(0)
        self.ids = random.integers(0, TOKENS, (steps * BATCH, LENGTH))
        self.labels = np.where(random.random(self.ids.shape) < 0.3, -100, self.ids)
        following = np.concatenate([self.labels[:, 1:], np.full((len(self.labels), 1), -100)], 1)
        np.savez(folder / "data.npz", input_ids=self.ids, labels=following)
        assert invoke(["export", str(folder / "llama"), "-o", str(folder / "llama.onnx"), "-q"]) == 0
        for name, plan in plans.items():
            accumulate = "" if "pipeline" in plan else "  accumulate: 2\n"
            (folder / f"{name}.yaml").write_text(f"ranks: 2\n{plan}{self._train()}{accumulate}")
            compile_model(folder / "llama.onnx", folder / f"{name}.yaml", folder / name)

    def _train(self) -> str:
        schedule = f"{{type: cosine, steps: {self.steps}, warmup: {WARMUP}, from_zero: true}}"
        return f"""train:
  loss: {{type: softmax_cross_entropy, logits: logits, labels: labels, ignore_index: -100}}
  optimizer: {{type: adamw, lr: 0.002, weight_decay: 0.1}}
  parameters: {{"**.*norm*": {{weight_decay: 0}}}}
  clip: {{norm: 0.5}}
  schedule: {schedule}
  data: data.npz
  batch: {BATCH}
  shuffle: false
  log: 1
"""

    def trainer(self) -> tuple[list[float], dict[int, dict[str, np.ndarray]], Any]:
        """The Trainer's loss of every step, the weights after half of the steps and after all, and the model."""
        from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

        model = LlamaForCausalLM.from_pretrained(self.folder / "llama")
        weights: dict[int, dict[str, np.ndarray]] = {}
        half = self.steps // 2

        class Ordered(Trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: object) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        class Snapshot(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
                if state.global_step in (half, args.max_steps):
                    found = model.state_dict().items()
                    weights[state.global_step] = {name: one.numpy().copy() for name, one in found}

        arguments = TrainingArguments(
            output_dir=str(self.folder / "trainer"),
            per_device_train_batch_size=BATCH // 2,
            gradient_accumulation_steps=2,
            max_steps=self.steps,
            learning_rate=0.002,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP,
            max_grad_norm=0.5,
            weight_decay=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch",
            logging_nan_inf_filter=False,
        )
        rows = [
            {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
            for ids, labels in zip(self.ids, self.labels, strict=True)
        ]
        run = Ordered(model, arguments, train_dataset=rows, callbacks=[Snapshot()])
        run.train()
        losses = [row["loss"] for row in run.state.log_history if "loss" in row]
        return losses, weights, model.eval()

    def partc(self, plan: str, steps: int, resume: str = "") -> tuple[list[float], dict[str, np.ndarray]]:
        """The losses of the steps that a plan's training takes up to so many, and its weights then."""
        runs, log = self.folder / f"{plan}.{resume}.runs", self.folder / f"{plan}.{resume}.{steps}.jsonl"
        words = [
            "train",
            str(self.folder / plan),
            "--plan",
            str(self.folder / f"{plan}.yaml"),
            "--in-process",
            "--threads",
            "1",
        ]
        begun = ["--resume", str(self.folder / f"{resume}..runs")] if resume else []
        more = ["--steps", str(steps), "--checkpoint", str(runs), "--metrics", str(log)]
        assert invoke([*words, *begun, *more, "-q"]) == 0
        rows = map(json.loads, log.read_text().splitlines())
        found = latest(runs)
        assert found is not None
        checkpoint = Checkpoint.open(found)
        names = [name for name, one in checkpoint.index.tensors.items() if one.kind == "parameter"]
        return [row["loss"] for row in rows if row["kind"] == "train"], {name: checkpoint.read(name) for name in names}


def largest(have: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """The largest difference of weights of the same names."""
    return max(float(np.abs(array - want[name]).max()) for name, array in have.items())
