"""Bits per byte of a model on any corpus, next to what compressors reach.

    python examples/llm/evaluate.py runs/quickstart corpus='data/*.jsonl.zst' context=1024 stride=512
    torchrun --nproc-per-node=2 examples/llm/evaluate.py path/to/hf_folder corpus=test.jsonl.zst output=result.json

The model is a checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face folder.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.launch import outlast_gloo
from nemo_like.core.paths import resolve
from nemo_like.core.script import run_script
from nemo_like.data.corpus import find_subset, read_corpus
from nemo_like.data.held_out import is_held_out
from nemo_like.data.jsonl_zst import ReadReport
from nemo_like.data.progress import show_bytes
from nemo_like.tracking.terminal import print_sections

if TYPE_CHECKING:
    import torch

    from nemo_like.collections.llm.evaluation import Evaluation


def make_parser() -> argparse.ArgumentParser:
    """All arguments there are."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add(
        "--corpus",
        action="append",
        default=[],
        help="jsonl.zst file or glob; may be given several times",
    )
    add(
        "--context",
        type=int,
        help="tokens that the model reads at most; default: as many as it is meant for",
    )
    add("--stride", type=int, help="tokens that each later window predicts; default: context")
    add("--batch-size", type=int, default=8, help="windows that are computed at once")
    add("--subset-key", default="subset", help="key of meta that names the subset of a document")
    add(
        "--held-out-fraction",
        type=float,
        help="evaluate only what a run with this fraction holds out",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what a record does that cannot be read",
    )
    add(
        "--compression",
        choices=("true", "false"),
        default="true",
        help="measure gzip and zstd as well",
    )
    add("--weights", choices=("model", "ema"), default="model", help="ema: their moving average")
    add("--quantize", help="also with weights in a byte each: int8, int8-dynamic or fp8")
    add("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    add("--output", type=Path, help="JSON file to write all figures to")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads ``key=value`` like ``--key value``; what is unknown is refused."""
    spelled = [
        re.sub(r"^(\w+)=", lambda key: f"--{key[1]}=".replace("_", "-"), each) for each in argv
    ]
    known, unknown = make_parser().parse_known_args(spelled)
    keys = sorted(vars(known))
    names = [each.lstrip("-").partition("=")[0].replace("-", "_") for each in unknown]
    faults = [
        f"{name!r} is no argument{suggest(name, keys)}; there are: {', '.join(keys)}"
        for name in names
    ]
    if not known.corpus:
        faults.append("corpus is missing: say which text, e.g. corpus='data/*.jsonl.zst'")
    if known.held_out_fraction is not None and not 0 <= known.held_out_fraction <= 1:
        faults.append(f"held_out_fraction={known.held_out_fraction}: must lie between 0 and 1")
    if faults:
        raise ConfigError(faults)
    return known


def join_world(device_name: str | None) -> "tuple[int, int, torch.device]":
    """Rank and number of ranks as torchrun says them, and the device to compute on."""
    import torch

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    name = device_name or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        outlast_gloo()
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, size, device


def read(
    paths: Sequence[Path], arguments: argparse.Namespace, report: ReadReport
) -> Iterator[tuple[str, str]]:
    """Subset and text of the documents that are asked for; shows how far it is."""
    fraction = arguments.held_out_fraction
    with show_bytes("evaluating") as progress:
        for document in read_corpus(
            paths, on_error=arguments.on_error, report=report, progress=progress
        ):
            if fraction is None or is_held_out(document.text, fraction):
                yield find_subset(document, subset_key=arguments.subset_key), document.text


def evaluate(arguments: argparse.Namespace) -> None:
    """Loads, computes on all ranks, and prints on the first."""
    import torch

    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.evaluation import evaluate_bits_per_byte
    from nemo_like.collections.llm.quantize import check_kind, quantize_network

    if arguments.quantize is not None:
        check_kind(arguments.quantize)  # before the first figures are computed
    rank, world_size, device = join_world(arguments.device)
    model = DecoderModel.load(arguments.model, weights=arguments.weights).to(device)
    assert model.tokenizer is not None, "load() brings it"
    paths = [path for spec in arguments.corpus for path in resolve(spec)]
    longest = model.network.shape.max_positions

    def measure(report: ReadReport, *, compression: bool) -> "Evaluation":
        assert model.tokenizer is not None, "load() brings it"
        return evaluate_bits_per_byte(
            model.network,
            model.tokenizer,
            read(paths, arguments, report),
            context=longest if arguments.context is None else arguments.context,
            stride=arguments.stride,
            batch_size=arguments.batch_size,
            compression=compression,
            rank=rank,
            world_size=world_size,
        )

    report = ReadReport()
    result = measure(report, compression=arguments.compression == "true")
    quantization = None
    if arguments.quantize is not None:
        quantization = quantize_network(model.network, arguments.quantize)
        after = measure(ReadReport(), compression=False)
        result = dataclasses.replace(result, quantized={quantization.kind: after.model})
    if world_size > 1:
        torch.distributed.destroy_process_group()
    if rank:
        return
    figures = {
        "model": str(arguments.model),
        "corpus": [str(path) for path in paths],
        "held_out_fraction": arguments.held_out_fraction,
        "skipped_records": dict(report.faults),
        "quantization": None if quantization is None else dataclasses.asdict(quantization),
        **result.to_dict(),
    }
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    if arguments.output is not None:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    if arguments.json:
        print(text)
    else:
        title = f"Bits per byte of {arguments.model} on {', '.join(arguments.corpus)}"
        print_sections([result.to_section(title)])
        if quantization is not None:
            print(quantization.describe())


def main() -> None:
    """The command."""
    run_script(lambda argv: evaluate(parse_arguments(argv)))


if __name__ == "__main__":
    main()
