"""The engine next to static batching: the same requests of mixed length, the same rows, in turn.

    python tools/bench_engine.py path/to/hf_folder --batch 8 --threads 2

All requests are there at the beginning. Prompts have 16 to 128 tokens, texts 8 to 128, drawn evenly on a logarithmic
scale (many are short) or, with --lengths uniform, on a linear one. Static batching takes requests in the order of
arrival, computes a batch until its longest text is done, and only then takes the next; what it computes beyond the end
of a shorter text is not counted. Reports medians over the turns. Both must give the same tokens.
"""

import argparse
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.generate import generate
from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
from nemo_like.collections.llm.serving import Engine, EngineConfig


@dataclass
class Turn:
    """What one pass over all requests gave."""

    seconds: float
    tokens: list[list[int]]
    first_s: list[float]
    """Of each request, from the beginning to its first token."""
    each_s: list[float]
    """Of each request, a further token on average."""


def draw_requests(count: int, vocab: int, lengths: str, seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens follow each."""
    draw = random.Random(seed)

    def draw_length(least: int, most: int) -> int:
        if lengths == "uniform":
            return draw.randint(least, most)
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    return [
        ([draw.randrange(vocab) for _ in range(draw_length(16, 128))], draw_length(8, 128))
        for _ in range(count)
    ]


def configure(max_tokens: int) -> GenerationConfig:
    """The likeliest tokens, exactly so many."""
    return GenerationConfig(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def run_engine(model: DecoderModel, requests: list[tuple[list[int], int]], batch: int) -> Turn:
    """All requests through the engine."""
    assert model.tokenizer is not None, "load() brings it"
    config = EngineConfig(max_batch=batch, max_waiting=len(requests), cache_size=256)
    engine = Engine(model.network, model.tokenizer, config, clock=time.perf_counter)
    start = time.perf_counter()
    handles = [engine.submit(prompt, configure(count)) for prompt, count in requests]
    while engine.step():
        pass
    seconds = time.perf_counter() - start
    engine.close()
    first_s, each_s = [], []
    for handle in handles:
        assert handle.first_token_s is not None, "all are done"
        assert handle.ended_s is not None, "all are done"
        first_s.append(handle.first_token_s - start)
        each_s.append((handle.ended_s - handle.first_token_s) / (len(handle.request.tokens) - 1))
    return Turn(seconds, [it.result(0).tokens for it in handles], first_s, each_s)


def run_static(model: DecoderModel, requests: list[tuple[list[int], int]], batch: int) -> Turn:
    """All requests in batches; a text is there when its batch is done, as nothing is streamed."""
    assert model.tokenizer is not None, "load() brings it"
    tokens: list[list[int]] = []
    first_s = []
    start = time.perf_counter()
    for at in range(0, len(requests), batch):
        part = requests[at : at + batch]
        longest = max(count for _, count in part)
        results = generate(
            model.network, model.tokenizer, [prompt for prompt, _ in part], configure(longest)
        )
        tokens += [it.tokens[:count] for it, (_, count) in zip(results, part, strict=True)]
        first_s += [time.perf_counter() - start] * len(part)
    return Turn(time.perf_counter() - start, tokens, first_s, [])


def describe(values: list[float], scale: float) -> str:
    """Percentiles of some values."""
    if not values:
        return f"{'-':>9}{'-':>9}"
    ordered = sorted(values)
    picked = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95)]
    return "".join(f"{value * scale:9.2f}" for value in picked)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder, or a checkpoint")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16], help="rows")
    parser.add_argument("--lengths", choices=["log", "uniform"], default="log")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = DecoderModel.load(options.folder).to(options.device)
    assert model.tokenizer is not None, "load() brings it"
    lay_out_for_decoding(model.network)
    requests = draw_requests(
        options.requests, model.tokenizer.vocab_size, options.lengths, options.seed
    )
    wanted = sum(count for _, count in requests)
    print(
        f"{len(requests)} requests ({options.lengths} lengths): {sum(len(it) for it, _ in requests)} "
        f"tokens of prompts, {wanted} generated; {options.threads} threads, torch {torch.__version__}"
    )
    print(
        f"{'':16}{'tokens/s':>10}{'ratio':>7}{'first s 50%':>13}{'95%':>5}{'each ms 50%':>13}{'95%':>5}"
    )
    for batch in options.batch:
        turns: dict[str, list[Turn]] = {"engine": [], "static": []}
        for _ in range(options.repeats):
            turns["engine"].append(run_engine(model, requests, batch))
            turns["static"].append(run_static(model, requests, batch))
        if turns["engine"][0].tokens != turns["static"][0].tokens:
            print("  the two gave other tokens")
        medians = {
            name: statistics.median(it.seconds for it in each) for name, each in turns.items()
        }
        for name, each in turns.items():
            last = each[-1]
            print(
                f"{name + f' {batch} rows':16}{wanted / medians[name]:10.1f}"
                f"{medians['static'] / medians[name]:7.2f}"
                f"{describe(last.first_s, 1)}{describe(last.each_s, 1e3)}"
            )


if __name__ == "__main__":
    main()
