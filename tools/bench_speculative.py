"""Greedy decoding with drafts next to plain greedy decoding, same model and prompts, in turn.

    python tools/bench_speculative.py runs/target --draft runs/draft --corpus 'pkg://nemo_like.samples/text/*.jsonl.zst'

Prompts are the first tokens of documents that a run with the same ``held_out_fraction`` did not train on. Reports
medians over the turns: milliseconds a token, the ratio to plain decoding (above 1: the draft is faster), the share of
guesses that were taken, and how many a pass took. All must give the same tokens. ``tools/truncate_draft.py`` says how a
draft is made.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_like.collections.llm.decoder import DecoderModel
from nemo_like.collections.llm.generation import (
    GenerationConfig,
    GenerationResult,
    ModelDraft,
    PromptLookup,
)
from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
from nemo_like.collections.llm.generation.speculative import Draft, summarize_speculation
from nemo_like.collections.llm.quantize import quantize_network
from nemo_like.core.paths import resolve
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import read_documents
from nemo_like.text.tokenizer import Tokenizer


def load(folder: Path, *, quantize: str | None = None) -> tuple[DecoderModel, Tokenizer]:
    """A model and its tokenizer, laid out for decoding."""
    model = DecoderModel.load(folder)
    if quantize is not None:
        print(quantize_network(model.network, quantize).describe())
    lay_out_for_decoding(model.network)
    assert model.tokenizer is not None, "load() brings it"
    return model, model.tokenizer


def read_prompts(
    corpus: str, tokenizer: Tokenizer, *, fraction: float, count: int, size: int
) -> list[list[int]]:
    """The first tokens of held-out documents, spread over the corpus."""
    texts = [each.text for each in read_documents(resolve(corpus))]
    held_out = [text for text in texts if fraction >= 1 or is_held_out(text, fraction)]
    prompts = [[tokenizer.prefix_id, *tokenizer.encode(text)][:size] for text in held_out]
    prompts = [prompt for prompt in prompts if len(prompt) == size]
    if len(prompts) < count:
        raise SystemExit(f"error: only {len(prompts)} held-out documents have {size} tokens")
    return prompts[:: len(prompts) // count][:count]


def run(
    model: DecoderModel,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    draft: Draft | None,
    batch: int,
) -> tuple[float, list[GenerationResult]]:
    """Seconds, and the results."""
    start, results = time.perf_counter(), []
    for at in range(0, len(prompts), batch):
        results += model.generate(prompts[at : at + batch], config, draft=draft)
    return time.perf_counter() - start, results


def compare(
    model: DecoderModel,
    prompts: Sequence[list[int]],
    drafts: dict[str, Draft | None],
    *,
    new_tokens: int,
    batch: int,
    repeats: int,
) -> None:
    """Runs all in turn and prints a line each; the first one is what the others are compared with."""
    config = GenerationConfig(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for draft in drafts.values():  # warms up
        run(model, prompts[:batch], config, draft, batch)
    times: dict[str, list[float]] = {name: [] for name in drafts}
    last: dict[str, list[GenerationResult]] = {}
    for _ in range(repeats):
        for name, draft in drafts.items():
            seconds, last[name] = run(model, prompts, config, draft, batch)
            times[name].append(seconds)
    (first, expected), *_ = last.items()
    for name, results in last.items():
        each_ms = statistics.median(times[name]) / (len(prompts) * new_tokens) * 1e3
        ratio = statistics.median(times[first]) / statistics.median(times[name])
        total = summarize_speculation(results)
        other = sum(a.tokens != b.tokens for a, b in zip(results, expected, strict=True))
        note = f"  {other} TEXTS DIFFER" if other else ""
        print(
            f"{name:18}{batch:6}{each_ms:10.2f}{ratio:8.2f}{total.acceptance_rate:10.1%}"
            f"{total.accepted_per_pass:10.2f}{note}",
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--draft", type=Path, help="folder of the draft; without one only lookup is measured")
    add("--corpus", required=True, help="jsonl.zst file or glob that prompts are taken from")
    add("--held-out-fraction", type=float, default=0.05, help="as in training; 1 takes all")
    add("--draft-tokens", type=int, nargs="+", default=[2, 3, 4, 6])
    add("--batch", type=int, nargs="+", default=[1])
    add("--threads", type=int, default=1)
    add("--prompts", type=int, default=8, help="documents")
    add("--prompt", type=int, default=32, help="tokens of a prompt")
    add("--new", type=int, default=128, help="tokens that are generated")
    add("--repeats", type=int, default=5, help="turns of each contestant")
    add("--quantize", help="of the model: int8, int8-dynamic or fp8")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, quantize=options.quantize)
    prompts = read_prompts(
        options.corpus,
        tokenizer,
        fraction=options.held_out_fraction,
        count=options.prompts,
        size=options.prompt,
    )
    drafts: dict[str, Draft | None] = {"plain": None}
    if options.draft is not None:
        smaller, its_tokenizer = load(options.draft)
        counts = f"{smaller.shape.count_parameters() / 1e6:.2f}"
        for count in options.draft_tokens:
            drafts[f"draft, {count}"] = ModelDraft(smaller.network, its_tokenizer, num_tokens=count)
    else:
        counts = "no"
    for count in options.draft_tokens:
        drafts[f"lookup, {count}"] = PromptLookup(num_tokens=count)
    print(
        f"{model.shape.count_parameters() / 1e6:.2f} M parameters, draft {counts} M; "
        f"{options.prompts} prompts of {options.prompt} tokens, {options.new} new ones, fp32, "
        f"{options.threads} threads, torch {torch.__version__}"
    )
    print(f"{'':18}{'batch':>6}{'ms/token':>10}{'ratio':>8}{'accepted':>10}{'a pass':>10}")
    for batch in options.batch:
        compare(
            model, prompts, drafts, new_tokens=options.new, batch=batch, repeats=options.repeats
        )


if __name__ == "__main__":
    main()
