"""A training step at real size against torch on the same cores, in turns: time, memory, time to the first step.

    python real_training.py [CASE...] [--tokens 256] [--records 2] [--steps 2] [--turns 3]

    smol-dp2      SmolLM-135M's shape on 2 ranks, data parallel, against DistributedDataParallel over gloo; one thread each
    smol-stages   the same in 2 stages with 4 microbatches, against one process of 2 threads with 4 accumulated parts
    smol-lora     adapters of rank 8 at queries and values on one rank, against peft; one thread each
    qwen-tp2      Qwen2.5-0.5B's shape on 2 ranks, tensor parallel, against one process of 2 threads

A step is forward, backward and the update by AdamW. Both sides begin with the same weights, and the losses of the first steps are
compared. With `--alone` the sides are measured one after the other, for a machine without the memory for both at once. The
interpreter has torch and transformers, for adapters peft.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "support"))

from turns import Side, serve, told

HERE = Path(__file__).parent
FIRST = 3
LR = 1e-4
CASES = {"smol-dp2": (2, 1), "smol-stages": (1, 2), "smol-lora": (1, 1), "qwen-tp2": (1, 2)}
"""Maps each case to torch's processes and the threads of each."""
OPTIONS = {"smol-dp2": "--dp 2", "smol-stages": "--stages 2", "smol-lora": "", "qwen-tp2": "--tp 2"}
PARTS = {"smol-stages": 4}
MODEL = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

SHAPES = {
    "smol": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "qwen": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}


class WithLoss(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, tokens, labels):
        return self.net(input_ids=tokens, labels=labels, use_cache=False).loss


def with_loss(case):
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(SHAPES[case.split("-")[0]]()).train()
    if case.endswith("lora"):
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
    return WithLoss(net)


model = with_loss("CASE")
inputs = {"tokens": torch.zeros(RECORDS, TOKENS, dtype=torch.int64), "labels": torch.zeros(RECORDS, TOKENS, dtype=torch.int64)}
outputs = ["loss"]
"""


def write(folder: Path, case: str, records: int, tokens: int) -> None:
    """The model, its plan, its artifact, and the records of each rank; prints what the commands take."""
    ranks, parts = CASES[case][0], PARTS.get(case, 1)
    words = {"CASE": case, "RECORDS": str(records * ranks), "TOKENS": str(tokens)}
    text = MODEL
    for word, value in words.items():
        text = text.replace(word, value)
    (folder / "model.py").write_text(text)
    plan = folder / "plan.yaml"
    if options := OPTIONS[case].split():
        _timed("plan", [*_partc("plan"), str(folder / "model.py"), *options, "-o", str(plan)])
    else:
        plan.write_text("ranks: 1\n")
    with plan.open("a") as file:
        if parts > 1:
            file.write(f"\npipeline: {{microbatches: {parts}, schedule: 1f1b}}\n")
        file.write(
            f"\ntrain:\n  loss: loss\n  optimizer: {{type: adamw, lr: {LR}}}\n  batch: {records * ranks * parts}\n"
        )
    _timed("compile", [*_partc("compile"), str(folder / "model.py"), "--plan", str(plan), "-o", str(folder / "build")])
    rng = np.random.default_rng(0)
    for rank in range(ranks):
        mine = rng.integers(0, 49152, (records * parts, tokens))
        np.savez(folder / f"feeds_{rank}.npz", tokens=mine, labels=mine)


def _partc(verb: str) -> list[str]:
    return [sys.executable, "-m", "partc.cli", verb]


def _timed(name: str, command: list[str]) -> None:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name:24} {spent:8.1f} s of CPU, {time.monotonic() - start:8.1f} s", flush=True)


def torch_program(folder: Path, case: str) -> None:
    """One of torch's processes."""
    import torch
    import torch.distributed as dist

    processes, threads = CASES[case]
    rank, parts = int(os.environ.get("RANK", "0")), PARTS.get(case, 1)
    torch.set_num_threads(threads)
    sys.path.insert(0, str(folder))
    module: torch.nn.Module = __import__("model").model
    if processes > 1:
        dist.init_process_group("gloo")
        module = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=LR, weight_decay=0.01)
    with np.load(folder / f"feeds_{rank}.npz") as file:
        batch = {name: torch.from_numpy(file[name]) for name in file.files}

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for k in range(parts):
            size = len(batch["tokens"]) // parts
            loss = module(**{name: value[k * size : (k + 1) * size] for name, value in batch.items()}) / parts
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    losses = torch.tensor([step() for _ in range(FIRST)])
    if processes > 1:
        dist.all_reduce(losses)
    if rank == 0:
        np.save(folder / "torch.npy", losses.numpy() / processes)
    serve(step, told(), rank == 0)
    if rank == 0:
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def sides(folder: Path, case: str) -> list[tuple[str, list[list[str]], list[dict[str, str]]]]:
    """Both sides: their names, commands and environments."""
    from partc.runtime.communication.mpi_calls import settings
    from train_data_parallel import free_port
    from transformer import ROOT, mpi_command

    processes, threads = CASES[case]
    common = {"OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(processes)}
    program = [sys.executable, __file__, "--torch", str(folder), case]
    ranks = 1 if case == "smol-lora" else 2
    own = mpi_command(ranks, str(HERE.parent / "train_partc.py"), str(folder), "--memory")
    return [
        ("partc", [own], [{**settings(5), **ROOT}]),
        ("torch", [program] * processes, [common | {"RANK": str(rank)} for rank in range(processes)]),
    ]


def measure(case: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"== {case}", flush=True)
        write(folder, case, options.records, options.tokens)
        known = sides(folder, case)
        times: dict[str, list[float]] = {}
        for group in [[one] for one in known] if options.alone else [known]:
            running = []
            for name, commands, environments in group:
                start = time.monotonic()
                running.append(Side(name, commands, environments))
                print(f"{name + ': to step ' + str(FIRST):24} {time.monotonic() - start:8.1f} s", flush=True)
            for turn in range(options.turns + 1):
                for side in running:
                    spent = side.turn(options.steps)
                    side.times += spent if turn else []
            for side in running:
                times[side.name] = side.times
                print(f"{side.name + ': memory of rank 0':24} {side.close()}", flush=True)
        own, other = (1e3 * statistics.median(times[name]) for name in ("partc", "torch"))
        losses = [np.load(folder / f"{name}.npy") for name in ("partc", "torch")]
        apart = float(np.abs(losses[0] / losses[1] - 1).max())
        print(
            f"{case:12} partc {own:9.0f} ms, torch {other:9.0f} ms, ratio {own / other:.2f}; losses by {apart:.1e}",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["--torch"]:
        torch_program(Path(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--records", type=int, default=4, help="of a process of torch in a step, or in a microbatch")
    parser.add_argument("--steps", type=int, default=1, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="one side after the other, not in turns")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    print(
        f"{os.cpu_count()} cores, {options.records} records of {options.tokens} tokens a process, load {os.getloadavg()[0]:.1f}"
    )
    for case in options.cases or CASES:
        measure(case, options)


if __name__ == "__main__":
    main()
