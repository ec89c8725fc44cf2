"""Adds an adapter to its base and writes one model: ``python examples/llm/merge_adapter.py runs/sft_lora merged``.

The adapter is the folder of a run, a checkpoint, or a folder of peft; the result opens in Hugging Face transformers.
With --adapter-only nothing is merged: the adapter is written as a folder of peft.
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
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("folder", type=Path, help="is made, and must not exist yet")
    parser.add_argument(
        "--base", type=Path, help="folder of the base; else the one that the adapter names"
    )
    parser.add_argument(
        "--adapter-only", action="store_true", help="write a folder of peft instead"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="type of the merged weights"
    )
    arguments = parser.parse_args()

    import torch

    from nemo_like.collections.llm.adapters.folder import export_adapter, merge_adapter

    try:
        if arguments.adapter_only:
            folder = export_adapter(arguments.adapter, arguments.folder, base=arguments.base)
        else:
            dtype = getattr(torch, arguments.dtype)
            folder = merge_adapter(
                arguments.adapter, arguments.folder, base=arguments.base, dtype=dtype
            )
    except NemoLikeError as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
