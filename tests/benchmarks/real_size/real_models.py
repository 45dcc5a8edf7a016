"""Makes the files that `real_generation.py` compares: a Llama of real size with random weights, and what the other sides read.

python real_models.py folder SHAPE FOLDER     # bfloat16, as transformers saves it; needs torch and transformers
python real_models.py gguf FOLDER FILE        # Q4_0, all tensors; needs gguf, torch and safetensors
python real_models.py genai FOLDER TARGET     # int4 with blocks of 32, by the builder of onnxruntime-genai
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SHAPES = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 32000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "middle": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
"""The shape of Llama-3.2-1B, and two for quick turns."""


def folder(shape: str, path: str) -> None:
    """A folder of transformers; its tokenizer knows nothing, but genai's builder wants one."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="1GB")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a"))).save_pretrained(path)


def gguf(path: str, target: str) -> None:
    """A file of llama.cpp: products and the table in four bits."""
    import gguf_file
    import torch
    from safetensors import safe_open

    def tensors() -> dict[str, torch.Tensor]:
        files = [safe_open(file, "pt") for file in sorted(Path(path).glob("*.safetensors"))]
        return {name: file.get_tensor(name) for file in files for name in list(file.keys())}

    gguf_file.write(Path(path), Path(target), ((name, one.float().numpy()) for name, one in tensors().items()))


def genai(path: str, target: str) -> None:
    """A folder of onnxruntime-genai, whose sessions have one thread."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-p", "int4", "-e", "cpu", "-c", f"{target}.cache", "--extra_options"]
    extra = ["int4_accuracy_level=4", "int4_block_size=32"]
    subprocess.run([*builder, "-i", path, "-o", target, *options, *extra], check=True)
    file = Path(target) / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 1
    file.write_text(json.dumps(config, indent=2))


MAKERS: dict[str, Callable[[str, str], None]] = {"folder": folder, "gguf": gguf, "genai": genai}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](*sys.argv[2:])
