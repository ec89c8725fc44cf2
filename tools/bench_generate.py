"""Greedy decoding next to transformers with its dynamic cache, same weights, in turn.

    python tools/bench_generate.py path/to/hf_folder --batch 1 8 --threads 1 2

Reports medians over the turns: time to the first token, time of each further token, tokens a second, and the ratio of
the whole times (above 1: ours is faster). Both must give the same tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.generate import generate
from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
from nemo_like.core.extras import require

Turn = Callable[[list[list[int]], int], list[list[int]]]


def build_ours(model: DecoderModel) -> Turn:
    """Continues prompts through this project."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "load() brings it"

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = GenerationConfig(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        results = generate(model.network, tokenizer, prompts, config)
        return [result.tokens for result in results]

    return run


def build_transformers(folder: Path, device: str) -> Turn:
    """Continues prompts through transformers."""
    transformers = require("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        tokens_BT = torch.tensor(prompts, device=device)
        out = model.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="dynamic",
        )
        tokens: list[list[int]] = out[:, tokens_BT.size(1) :].tolist()
        return tokens

    return run


def measure(
    turns: dict[str, Turn], prompts: list[list[int]], *, new_tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Medians in seconds: ``first``, ``each`` further token, and the ``whole``."""
    times: dict[str, dict[str, list[float]]] = {name: {"first": [], "whole": []} for name in turns}
    expected = None
    for repeat in range(repeats + 1):
        for name, run in turns.items():
            start = time.perf_counter()
            run(prompts, 1)
            first = time.perf_counter() - start
            start = time.perf_counter()
            tokens = run(prompts, new_tokens)
            whole = time.perf_counter() - start
            expected = expected or tokens
            if tokens != expected:
                print(f"  {name}: other tokens than the first contestant")
            if repeat:  # the first turn warms up
                times[name]["first"].append(first)
                times[name]["whole"].append(whole)
    medians = {
        name: {kind: statistics.median(values) for kind, values in kinds.items()}
        for name, kinds in times.items()
    }
    for row in medians.values():
        row["each"] = (row["whole"] - row["first"]) / (new_tokens - 1)
    return medians


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens that are generated, at least 2")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = DecoderModel.load(options.folder).to(options.device)
    lay_out_for_decoding(model.network)
    turns = {
        "ours": build_ours(model),
        "transformers": build_transformers(options.folder, options.device),
    }
    generator = torch.Generator().manual_seed(0)
    print(f"prompt {options.prompt}, {options.new} new tokens, fp32, torch {torch.__version__}")
    print(f"{'':22}{'first ms':>10}{'each ms':>10}{'tokens/s':>10}{'ratio':>8}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for batch in options.batch:
            vocab = model.shape.vocab_size
            prompts_BT = torch.randint(vocab, (batch, options.prompt), generator=generator)
            rows = measure(
                turns, prompts_BT.tolist(), new_tokens=options.new, repeats=options.repeats
            )
            for name, row in rows.items():
                speed = batch * options.new / row["whole"]
                ratio = rows["transformers"]["whole"] / row["whole"]
                title = f"{name} {batch} x, {threads} thr"
                print(
                    f"{title:22}{row['first'] * 1e3:10.1f}{row['each'] * 1e3:10.2f}"
                    f"{speed:10.1f}{ratio:8.2f}"
                )


if __name__ == "__main__":
    main()
