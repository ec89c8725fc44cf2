"""Continues prompts.

    python examples/llm/generate.py runs/quickstart --prompt "Once upon a time" --top-p 0.9
    echo "The capital of France is" | python examples/llm/generate.py path/to/hf_folder temperature=0
    python examples/llm/generate.py runs/quickstart --prompt-file prompts.jsonl --output texts.jsonl
    python examples/llm/generate.py path/to/hf_folder --draft path/to/smaller --prompt "Once upon" quantize=int8

The model is a checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face folder. One prompt is
streamed; several are continued together, and a file of prompts becomes a file of JSON lines.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nemo_like.collections.llm.generation.options import (
    add_generation_options,
    parse_spelled,
    read_generation_options,
    read_prompts,
    read_stop_tokens,
)
from nemo_like.core.errors import ConfigError
from nemo_like.core.script import run_script

if TYPE_CHECKING:
    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.generation import GenerationConfig, GenerationResult
    from nemo_like.collections.llm.generation.speculative import Draft


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--prompt", action="append", help="text to continue; may be given several times")
    add("--prompt-file", type=Path, help='.jsonl with "prompt" in each line, or a prompt a line')
    add("--output", type=Path, help="JSON lines file to write to")
    add("--json", action="store_true", help="print JSON lines instead of text")
    add("--batch-size", type=int, default=8, help="prompts that are continued at once")
    add("--draft", help="folder of a smaller model that guesses tokens, or prompt-lookup")
    add("--draft-tokens", type=int, help="guesses that are checked at once; default: 4, lookup 8")
    add("--quantize", help="weights in a byte each: int8, int8-dynamic or fp8")
    add("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    add_generation_options(parser)
    known = parse_spelled(parser, argv)
    faults = []
    if known.batch_size < 1:
        faults.append(f"batch_size={known.batch_size}: must be at least 1")
    if known.draft_tokens is not None and known.draft is None:
        faults.append(f"draft_tokens={known.draft_tokens}: has no effect without draft")
    if known.prompt and known.prompt_file:
        faults.append("prompt and prompt_file: give one of them")
    if not known.prompt and not known.prompt_file and sys.stdin.isatty():
        faults.append('a prompt is missing: --prompt "Once upon", --prompt-file FILE, or a pipe')
    if faults:
        raise ConfigError(faults)
    return known


def read_records(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be continued."""
    if arguments.prompt_file:
        return list(read_prompts(arguments.prompt_file))
    if arguments.prompt:
        return [{"prompt": prompt} for prompt in arguments.prompt]
    return [{"prompt": sys.stdin.read().removesuffix("\n")}]


def load_draft(arguments: argparse.Namespace, device: str) -> "Draft | None":
    """What guesses tokens, if anything."""
    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.generation import ModelDraft, PromptLookup
    from nemo_like.collections.llm.generation.layout import lay_out_for_decoding

    count = arguments.draft_tokens
    options = {} if count is None else {"num_tokens": count}
    if arguments.draft is None:
        return None
    if arguments.draft == "prompt-lookup":
        return PromptLookup(**options)
    model = DecoderModel.load(arguments.draft).to(device)
    assert model.tokenizer is not None, "load() brings it"
    lay_out_for_decoding(model.network)
    return ModelDraft(model.network, model.tokenizer, **options)


def generate_all(
    model: "DecoderModel",
    records: Sequence[dict[str, Any]],
    config: "GenerationConfig",
    size: int,
    draft: "Draft | None",
) -> Iterator[tuple[dict[str, Any], "GenerationResult"]]:
    """Continues records batch by batch."""
    for start in range(0, len(records), size):
        batch = records[start : start + size]
        # As in one batch: the seed of a prompt is its place among all.
        seeds = (
            None if config.seed is None else [config.seed + start + i for i in range(len(batch))]
        )
        prompts = [record["prompt"] for record in batch]
        results = model.generate(prompts, config, seeds=seeds, draft=draft)
        yield from zip(batch, results, strict=True)


def write_lines(
    pairs: Iterable[tuple[dict[str, Any], "GenerationResult"]], file: IO[str]
) -> list["GenerationResult"]:
    """Writes each result behind what its record held."""
    results = []
    for record, result in pairs:
        line = {**record, **dataclasses.asdict(result)}
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        results.append(result)
    return results


def show_stream(
    model: "DecoderModel", prompt: str, config: "GenerationConfig", draft: "Draft | None"
) -> "GenerationResult":
    """Writes a text to the terminal while it comes."""
    from nemo_like.collections.llm.generation.generate import stream

    assert model.tokenizer is not None, "load() brings it"
    sys.stdout.write(prompt)
    sys.stdout.flush()
    pieces = stream(model.network, model.tokenizer, prompt, config, draft=draft)
    while True:
        try:
            sys.stdout.write(next(pieces))
            sys.stdout.flush()
        except StopIteration as end:
            sys.stdout.write("\n")
            result: GenerationResult = end.value
            return result


def run(arguments: argparse.Namespace) -> None:
    """Loads, continues, and says how fast on standard error."""
    stop_tokens = read_stop_tokens(arguments.model)
    config = read_generation_options(arguments, stop_tokens=stop_tokens)
    records = read_records(arguments)
    if not records:
        raise ConfigError([f"{arguments.prompt_file}: holds no prompt"])

    import torch

    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.generation.generate import fit_max_tokens
    from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
    from nemo_like.collections.llm.generation.speculative import summarize_speculation
    from nemo_like.collections.llm.quantize import check_kind, quantize_network

    if arguments.quantize is not None:
        check_kind(arguments.quantize)  # before a large model is loaded
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = DecoderModel.load(arguments.model).to(device)
    if arguments.quantize is not None:
        sys.stderr.write(quantize_network(model.network, arguments.quantize).describe() + "\n")
    lay_out_for_decoding(model.network)
    draft = load_draft(arguments, device)
    assert model.tokenizer is not None, "load() brings it"
    if not hasattr(arguments, "max_tokens"):
        prompts = [record["prompt"] for record in records]
        config = fit_max_tokens(model.network, model.tokenizer, prompts, config)
    start = time.perf_counter()
    pairs = generate_all(model, records, config, arguments.batch_size, draft)
    if arguments.output:
        with arguments.output.open("w", encoding="utf-8") as file:
            results = write_lines(pairs, file)
    elif arguments.json:
        results = write_lines(pairs, sys.stdout)
    elif len(records) == 1 and config.num_beams == 1 and config.logprobs is None:
        results = [show_stream(model, records[0]["prompt"], config, draft)]
    else:
        results = []
        for record, result in pairs:
            sys.stdout.write(f"{record['prompt']}{result.text}\n" + "-" * 40 + "\n")
            results.append(result)
    seconds = time.perf_counter() - start
    count = sum(len(result.tokens) for result in results)
    seeds = f", seed {results[0].seed}" if len(results) == 1 and results[0].seed is not None else ""
    ends = {result.finish_reason for result in results}
    note = f" ({ends.pop()})" if len(results) == 1 else f" of {len(results)} texts"
    sys.stderr.write(
        f"{count} tokens{note} in {seconds:.1f} s, {count / seconds:.1f} tokens/s{seeds}\n"
    )
    if draft is not None:
        sys.stderr.write(f"draft: {summarize_speculation(results).describe()}\n")


def main() -> None:
    """The command."""
    run_script(lambda argv: run(parse_arguments(argv)))


if __name__ == "__main__":
    main()
