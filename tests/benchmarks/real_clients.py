"""Clients of OpenAI's API, unchanged, against `partc serve` of a decoder with a tokenizer.

    python tests/benchmarks/real_clients.py [--tp 2] [--slots 4]        pip install "lm_eval[api]" accelerate openai

A Llama of 2 layers with random weights and a tokenizer of bytes and pairs, made here. Prints a line for each request with its figures:

    lm-eval     a task of choices and one of perplexity by `local-completions`, each against lm-eval's `hf` model: the largest difference
                of a log-likelihood is at most 1e-4, or 2 units of the float32 in which `hf` adds those of a text; accuracy and perplexity
                are the same
    embeddings  openai's client, which asks for base64, against transformers' hidden states: at most 1e-5 apart
    adapters    a folder of peft's form is loaded while it serves: log-likelihoods against the model with the product added, 1e-5
    openai      logprobs of a completion and of a conversation, streamed and whole, echo, best_of, penalties; and what is refused
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.extend([str(path) for path in HERE.parent.iterdir() if path.is_dir()])
WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "an",
    "old",
    "mill",
    "where",
    "seven",
    "grey",
    "geese",
    "sleep",
    "\u00e9t\u00e9",
    "\u4f60\u597d",
]
LENGTH = 512
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--pooling", choices=("mean", "last"), default="mean")
    parser.add_argument("--only", default="embeddings,adapters,openai,lm-eval")
    options = parser.parse_args()
    from server_case import MpiServer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        plan = ["plan", "llama", "--tp", f"{options.tp}", "--generate", f"{LENGTH}", "--slots", f"{options.slots}"]
        for command in ([*plan, "-o", "plan.yaml"], ["compile", "llama", "--plan", "plan.yaml"]):
            subprocess.run([sys.executable, "-m", "partc.cli", *command], cwd=folder, check=True, capture_output=True)
            text = (folder / "plan.yaml").read_text()
            more = f"embeddings: {options.pooling}, adapters: 2, adapter_rank: 4"
            (folder / "plan.yaml").write_text(text.replace("generate: {", f"generate: {{{more}, ", 1))
        more = (
            "--tokenizer",
            str(folder / "llama" / "tokenizer.json"),
            "--served-model-name",
            "llama",
            "--threads",
            "1",
            "--adapters",
            str(folder),
        )
        with MpiServer(folder=folder / "build", options=more) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            only = options.only.split(",")
            if "embeddings" in only:
                of_embeddings(folder, url, options.pooling)
            if "adapters" in only:
                of_adapters(folder, url)
            if "openai" in only:
                of_openai(url)
            if "lm-eval" in only:
                of_lm_eval(folder, url, options.slots)


def text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def make(folder: Path) -> None:
    """The model, its tokenizer and the data of the tasks."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text(draw, 50) for _ in range(20)], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    whole.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    )
    whole.save_pretrained(folder / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    rows = {
        "choices": [
            {"text": text(draw, 12), "choices": [f" {text(draw, count)}" for count in (1, 3, 5, 9)], "answer": at % 4}
            for at in range(12)
        ],
        "perplexity": [{"text": text(draw, count)} for count in (5, 40, 300)],  # the last in several windows
    }
    for task, written in TASKS.items():
        (folder / f"{task}.json").write_text("".join(json.dumps(row) + "\n" for row in rows[task]))
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / task}.json}}}}\ntest_split: test\n"
        (folder / f"{task}.yaml").write_text(f"task: {task}\n{data}{written}")


def of_embeddings(folder: Path, url: str, pooling: str) -> None:
    import numpy as np
    import openai
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(folder / "llama"),
        AutoTokenizer.from_pretrained(folder / "llama"),
    )
    client, draw, apart = openai.OpenAI(base_url=url, api_key="none"), random.Random(3), []
    texts = [text(draw, count) for count in (1, 2, 5, 20, 60, 90)]
    asked: Any = {"model": "llama", "input": texts}
    answers = [client.embeddings.create(**asked), client.embeddings.create(**asked, dimensions=16)]
    for at, written in enumerate(texts):
        ids = torch.tensor([tokenizer.encode(written)])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0].double().numpy()
        whole = states.mean(0) if pooling == "mean" else states[-1]
        for answer, want in zip(answers, (whole, whole[:16]), strict=True):
            apart.append(float(np.abs(want / np.linalg.norm(want) - answer.data[at].embedding).max()))
    count = sum(len(tokenizer.encode(written)) for written in texts)
    assert max(apart) <= 1e-5, apart
    assert answers[0].usage.prompt_tokens == answers[0].usage.total_tokens == count
    print(f"openai embeddings, {pooling}: {len(texts)} inputs, {count} tokens counted, at most {max(apart):.1e} apart")


def of_adapters(folder: Path, url: str) -> None:
    import openai
    import torch
    from adapter_files import write_adapter
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(folder / "llama"),
        AutoTokenizer.from_pretrained(folder / "llama"),
    )
    sizes = {
        name: (one.in_features, one.out_features)
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and name != "lm_head"
    }
    more = write_adapter(folder / "letters", sizes, {name: 1 + at % 4 for at, name in enumerate(sizes)})
    client, body = openai.OpenAI(base_url=url, api_key="none"), {"lora_name": "letters", "lora_path": "letters"}
    ids = tokenizer.encode("seven grey geese sleep past an old mill where the river runs")
    asked: Any = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 0}

    def scores(name: str) -> list[float]:
        return client.completions.create(model=name, **asked).choices[0].logprobs.token_logprobs[1 : len(ids)]

    def wanted() -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [float(logits[at, token]) for at, token in enumerate(ids[1:])]

    plain = wanted()
    assert client.post("/load_lora_adapter", body=body, cast_to=str).startswith("Success")
    found = [scores("llama"), scores("letters"), scores("llama")]
    for name, added in more.items():
        module = model.get_submodule(name)
        module.weight.data += torch.tensor(added, dtype=torch.float32)
    apart = [
        max(abs(a - b) for a, b in zip(one, want, strict=True))
        for one, want in zip(found, (plain, wanted(), plain), strict=True)
    ]
    assert [one.id for one in client.models.list()] == ["llama", "letters"]
    assert client.post("/unload_lora_adapter", body={"lora_name": "letters"}, cast_to=str).startswith("Success")
    assert [one.id for one in client.models.list()] == ["llama"]
    print(
        f"adapter loaded: {len(ids) - 1} log-likelihoods, {apart[1]:.1e} apart, of the base {max(apart[0], apart[2]):.1e}"
    )
    assert max(apart) <= 1e-4


def of_lm_eval(folder: Path, url: str, slots: int) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    window, model = LENGTH - 1, folder / "llama"
    sides = {
        "hf": f"pretrained={model},dtype=float32,device=cpu,max_length={window}",
        "local-completions": f"model=llama,base_url={url}/completions,tokenizer={model},tokenizer_backend=huggingface,"
        f"num_concurrent={slots},max_length={window}",
    }
    found: dict[str, Any] = {
        kind: lm_eval.simple_evaluate(
            kind,
            model_args=given,
            tasks=[*TASKS],
            task_manager=tasks,
            batch_size=1,
            bootstrap_iters=0,
            log_samples=True,
        )
        for kind, given in sides.items()
    }
    hf, served = found.values()
    for task in TASKS:
        pairs = [*zip(numbers(hf["samples"][task]), numbers(served["samples"][task]), strict=True)]
        apart = [abs(one[0] - other[0]) for one, other in pairs]
        results = [{k: v for k, v in one["results"][task].items() if isinstance(v, float)} for one in found.values()]
        wrong = [one for one, (of_hf, _) in zip(apart, pairs, strict=True) if one > max(1e-4, abs(of_hf[0]) * 2**-22)]
        assert not wrong, (task, wrong)
        print(
            f"lm-eval {task}: {len(apart)} log-likelihoods, at most {max(apart):.1e} apart; {results[0]} and {results[1]}"
        )
        assert all(abs(one - results[1][name]) <= 1e-6 * one for name, one in results[0].items()), results
        if task == "choices":
            assert [one[1] for one in numbers(hf["samples"][task])] == [
                one[1] for one in numbers(served["samples"][task])
            ]


def numbers(samples: list[dict[str, Any]]) -> list[list[Any]]:
    """The log-likelihoods of samples, and of choices whether they are the likeliest, in the order of their documents."""
    found = []
    for one in sorted(samples, key=lambda sample: sample["doc_id"]):
        for response in one["filtered_resps"]:
            found.append([*response] if isinstance(response, list | tuple) else [response])
    return found


def of_openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    asked: dict[str, Any] = {"model": "llama", "prompt": "the river runs", "max_tokens": 8}
    whole = client.completions.create(**asked, logprobs=3, echo=True)
    scores = whole.choices[0].logprobs
    assert scores is not None
    assert scores.tokens
    assert scores.token_logprobs
    assert scores.text_offset
    assert "".join(scores.tokens).startswith("the river runs")
    assert scores.token_logprobs[0] is None
    events = [*client.completions.create(**asked, logprobs=3, echo=True, stream=True)]
    streamed = [one for event in events for one in event.choices[0].logprobs.token_logprobs or []]
    assert streamed == scores.token_logprobs
    print(f"openai completions: {len(streamed)} logprobs with echo, streamed the same")
    messages: Any = [{"role": "user", "content": "seven geese"}]
    chat = client.chat.completions.create(
        model="llama", messages=messages, max_tokens=8, logprobs=True, top_logprobs=5, temperature=0
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)
    print(f"openai chat: {len(content)} logprobs, each the first of {len(content[0].top_logprobs)}")
    biased = client.completions.create(**asked, logit_bias={"65": 100}, logprobs=0)
    assert biased.choices[0].logprobs
    assert len({*(biased.choices[0].logprobs.tokens or [])}) == 1
    best = client.completions.create(**asked, temperature=1.5, n=2, best_of=4, seed=1)
    assert len(best.choices) == 2
    penal = client.completions.create(
        **asked, frequency_penalty=2, presence_penalty=2, extra_body={"min_p": 0.1, "min_tokens": 8}
    )
    assert penal.usage
    assert penal.usage.completion_tokens == 8
    print("openai logit_bias, best_of, penalties, min_p, min_tokens: taken")
    wrong: list[dict[str, Any]] = [
        {"logit_bias": {f"{at}": 1 for at in range(10_000)}}, {"n": 10_000}, {"logprobs": 21},
        {"prompt": "geese " * 600, "echo": True, "logprobs": 1},
    ]  # fmt: skip
    for fields in wrong:
        try:
            client.completions.create(**{**asked, **fields})
            raise AssertionError(fields.keys())
        except openai.BadRequestError as error:
            print(f"openai {[*fields]}: 400, {error.body['message'][:90]}")  # type: ignore[index]


if __name__ == "__main__":
    main()
