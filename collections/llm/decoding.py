"""Drawing text from a language model, one token after the other."""

# Shapes: T = tokens read, V = vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.text.tokenizer import Tokenizer

from .decoder.network import DecoderNetwork

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8


@torch.no_grad()
def generate(
    network: DecoderNetwork,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Continues a prompt as a document that starts with it.

    Nothing is cached: every token costs a forward pass over all that is read. Where that would be more than the model
    is meant for, the oldest tokens are forgotten. The global random generators are left alone.

    Args:
        network: Computes on its own device, in evaluation mode.
        tokenizer: Of the network.
        prompt: Start of the document; empty lets the model begin it.
        max_tokens: Where to stop when the model does not end the document before.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_p: Draw from the likeliest tokens that together have this probability (Holtzman et al. 2020), above 0, up
            to 1.
        seed: The same seed gives the same text.

    Returns:
        The continuation, without the prompt; a character that was cut by ``max_tokens`` is left out.

    Raises:
        ValueError: A number is out of range.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 0")
    if not temperature >= 0:
        raise ValueError(
            f"temperature={temperature}: must be at least 0; 0 takes the likeliest token"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
    generator = torch.Generator().manual_seed(seed)
    read = tokenizer.encode(prompt)
    ids = [tokenizer.prefix_id, *read]
    was_training = network.training
    network.eval()
    try:
        for _ in range(max_tokens):
            logits_V = _compute_logits(network, ids[-network.shape.max_positions :])
            # An embedding may have more rows than there are tokens.
            logits_V = logits_V[: tokenizer.vocab_size]
            choice = _choose(logits_V, temperature=temperature, top_p=top_p, generator=generator)
            if choice == tokenizer.eos_id:
                break
            ids.append(choice)
    finally:
        network.train(was_training)
    # All at once and with the prompt: a character may lie across tokens, and some decoders drop a leading space.
    text = tokenizer.decode(ids[1:])
    return text[len(tokenizer.decode(read)) :].rstrip(_REPLACEMENT)


def _compute_logits(network: DecoderNetwork, ids: list[int]) -> Tensor:
    """Of the token that follows; (V,) float64 on the CPU, so that a device changes nothing but rounding."""
    weight_VD = network.output_weight_VD
    tokens_1T = torch.tensor([ids], device=weight_VD.device)
    hidden_1TD = network.compute_hidden(tokens_1T)
    return (hidden_1TD[0, -1] @ weight_VD.T.to(hidden_1TD.dtype)).cpu().double()


def _choose(
    logits_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    """A token id; the first of equally likely ones where the likeliest is asked for."""
    if temperature == 0:
        return int(logits_V.argmax())
    # The maximum goes first: divided by a tiny temperature it would be infinite.
    scaled_V = (logits_V - logits_V.max()) / temperature
    probabilities_V, ids_V = scaled_V.softmax(dim=0).sort(descending=True, stable=True)
    # Kept: every token before which less than top_p has been gathered; so always the first.
    before_V = probabilities_V.cumsum(dim=0) - probabilities_V
    probabilities_V = probabilities_V.masked_fill(before_V >= top_p, 0)
    drawn = torch.multinomial(probabilities_V, 1, generator=generator)
    return int(ids_V[drawn])
