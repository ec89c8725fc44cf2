"""Optional dependencies, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from nemo_like.core.errors import MissingExtraError

# Top-level module -> the pip extra that brings it.
EXTRAS = {
    "transformers": "hf",
    "huggingface_hub": "hf",
    "deepspeed": "deepspeed",
    "torchao": "fp8",
    "bitsandbytes": "finetune",
    "peft": "dev",
    "megatron": "megatron",
    "pyarrow": "parquet",
    "pynvml": "gpu",
    "gguf": "bench",
    "lm_dataformat": "bench",
    "lm_eval": "bench",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
}


def require(name: str) -> ModuleType:
    """Imports an optional dependency.

    Args:
        name: Module to import, for example ``"transformers"`` or ``"torch.utils.tensorboard"``.

    Raises:
        MissingExtraError: It is not installed; the text names the extra to install.
        ImportError: It is installed but broken; raised unchanged, so that it does not look missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name != top:
            raise
        extra = EXTRAS.get(top)
        remedy = f"pip install 'nemo-like[{extra}]'" if extra else f"pip install {top}"
        raise MissingExtraError(
            f"{top!r} is needed here and not installed; run: {remedy}"
        ) from error
