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
    arguments = parser.parse_args()

    import torch

    from nemo_like.collections.llm.decoder.model import DecoderModel
    from nemo_like.collections.llm.hf_folder import save_hf_folder

    try:
        model = DecoderModel.load(arguments.model)
        tokenizer = model.tokenizer
        folder = save_hf_folder(
            arguments.folder,
            model.shape,
            model.network.state_dict(),
            tokenizer_files=tokenizer.to_bytes() if tokenizer else None,
            bos_token_id=tokenizer.bos_id if tokenizer else None,
            eos_token_id=tokenizer.eos_id if tokenizer else None,
            dtype=getattr(torch, arguments.dtype),
        )
    except NemoLikeError as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
