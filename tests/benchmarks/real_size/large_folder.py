"""A folder that is larger than memory and disk: what `partc plan`, `compile --by-reference`, `check` and `inspect` of it take.

    python tests/benchmarks/real_size/large_folder.py [--layers 16] [--tp 8] [--files FOLDER] [--generate 1024]

Makes a folder of a Llama of the width of Llama-3-70B (31.6 GB of bfloat16 in 16 layers), whose weights are a sparse file that takes a few
pages of disk. Printed are CPU seconds and peak memory of each command, the first `plan` with torch's export and a second one without it,
and the disk that the artifact takes.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, INNER, HEADS, KEY_HEADS, VOCABULARY = 8192, 28672, 64, 8, 128256


def make_folder(folder: Path, layers: int) -> None:
    """The configuration, and a file whose header is all that is written of it."""
    heads = WIDTH // HEADS * KEY_HEADS
    shapes = {
        "model.embed_tokens.weight": [VOCABULARY, WIDTH],
        "lm_head.weight": [VOCABULARY, WIDTH],
        "model.norm.weight": [WIDTH],
    }
    for k in range(layers):
        of_layer = {
            "self_attn.q_proj": [WIDTH, WIDTH],
            "self_attn.k_proj": [heads, WIDTH],
            "self_attn.v_proj": [heads, WIDTH],
            "self_attn.o_proj": [WIDTH, WIDTH],
            "mlp.gate_proj": [INNER, WIDTH],
            "mlp.up_proj": [INNER, WIDTH],
            "mlp.down_proj": [WIDTH, INNER],
            "input_layernorm": [WIDTH],
            "post_attention_layernorm": [WIDTH],
        }
        shapes |= {f"model.layers.{k}.{name}.weight": shape for name, shape in of_layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    write_configuration(folder, layers)


def write_configuration(folder: Path, layers: int) -> None:
    """The configuration of a Llama of this width."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def measured(title: str, *command: str) -> tuple[float, float]:
    """Runs a command of partc, prints its CPU seconds and its peak memory in MiB, and returns both."""
    process = subprocess.Popen([sys.executable, "-m", "partc.cli", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"partc {' '.join(command)} failed")
    seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    print(f"{title:24} {seconds:8.1f} s {peak:8,.0f} MiB", flush=True)
    return seconds, peak


def disk_of(folder: Path) -> int:
    """The bytes of disk that the files of a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--generate", type=int, default=0, help="the length of sequences, of a plan that generates")
    parser.add_argument("--files", type=Path)
    asked = parser.parse_args()
    root = asked.files or Path(tempfile.mkdtemp())
    os.environ["PARTC_CACHE"] = str(root / "cache")
    model, plan, build = root / "llama", root / "plan.yaml", root / "build"
    plan.unlink(missing_ok=True)
    make_folder(model, asked.layers)
    file = model / "model.safetensors"
    print(f"weights: {file.stat().st_size / 1e9:.1f} GB, on disk {file.stat().st_blocks * 512:,} bytes")
    generate = ["--generate", str(asked.generate)] if asked.generate else []
    options = [str(model), "--tp", str(asked.tp), *generate, "-q", "-o", str(plan)]
    measured("plan, first", "plan", *options)
    plan.unlink()
    measured("plan, second", "plan", *options)
    measured("compile by reference", "compile", str(model), "--plan", str(plan), "-o", str(build), "--by-reference")
    measured("check", "check", str(build))
    measured("inspect", "inspect", str(build))
    print(f"artifact: {disk_of(build) / 1e6:.1f} MB of disk")
    if asked.files is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
