"""Writes a model as a folder for Hugging Face transformers: ``python examples/llm/export_hf.py runs/quickstart out``.

The model is a checkpoint folder or a run folder (its newest checkpoint).
"""

import argparse
import sys
from pathlib import Path

from nemo_like.core.errors import NemoLikeError

DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("folder", type=Path, help="is made, and must not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights")
    parser.add_argument(
        "--weights",
        choices=("model", "ema"),
        default="model",
        help="of a checkpoint: the weights, or their moving average",
    )
    arguments = parser.parse_args()

    import torch

    from nemo_like.collections.llm.decoder.model import open_source
    from nemo_like.collections.llm.decoder.network import DecoderNetwork
    from nemo_like.collections.llm.hf_folder import save_hf_folder

    try:
        source = open_source(arguments.model, weights=arguments.weights)
        tokenizer = source.tokenizer
        # Names and shapes; the weights are read file by file.
        with torch.device("meta"):
            state = DecoderNetwork(source.shape).state_dict()
        folder = save_hf_folder(
            arguments.folder,
            source.shape,
            state,
            tokenizer_files=tokenizer.to_bytes() if tokenizer else None,
            bos_token_id=tokenizer.bos_id if tokenizer else None,
            eos_token_id=tokenizer.eos_id if tokenizer else None,
            dtype=getattr(torch, arguments.dtype),
            read=source.read,
        )
    except NemoLikeError as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
