r"""Makes a draft for speculative decoding out of the first blocks of a model.

The draft has the model's embeddings, output matrix and vocabulary, so it guesses something from the start. It guesses
well after training on the text that the model was trained on, or that it is going to write:

    python examples/llm/pretrain.py +conf=llm/quickstart model.network.num_layers=12 run_dir=runs/target
    python tools/truncate_draft.py runs/target drafts/start --layers 1
    python examples/llm/pretrain.py +conf=llm/quickstart model.init_from=drafts/start model.network.num_layers=1 \
        run_dir=runs/draft
    python examples/llm/generate.py runs/target --draft runs/draft --prompt "Once upon"

The model is a checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face folder; the draft is a Hugging
Face folder.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.decoder.source import open_source
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.errors import NemoLikeError


def truncate(model: Path, folder: Path, *, num_layers: int) -> int:
    """Writes the draft; gives its number of parameters."""
    source = open_source(model)
    if not 1 <= num_layers < source.shape.num_layers:
        raise SystemExit(
            f"error: --layers {num_layers}: must be at least 1 and below {source.shape.num_layers}"
        )
    shape = dataclasses.replace(source.shape, num_layers=num_layers)
    with torch.device("meta"):
        state = DecoderNetwork(shape).state_dict()
    tokenizer = source.tokenizer
    save_hf_folder(
        folder,
        shape,
        state,
        tokenizer_files=tokenizer.to_bytes() if tokenizer else None,
        bos_token_id=tokenizer.bos_id if tokenizer else None,
        eos_token_id=tokenizer.eos_id if tokenizer else None,
        read=source.read,
    )
    return shape.count_parameters()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("folder", type=Path, help="is made, and must not exist yet")
    parser.add_argument("--layers", type=int, default=1, help="blocks that the draft keeps")
    options = parser.parse_args()
    try:
        count = truncate(options.model, options.folder, num_layers=options.layers)
    except NemoLikeError as error:
        sys.exit(f"error: {error}")
    print(f"{options.folder}: {count / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
