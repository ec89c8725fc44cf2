"""Which parameters decay, and which ones are matrices between two layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn


@dataclass(kw_only=True)
class ParameterGroups:
    """The trainable parameters of a module, each once, in the order of ``named_parameters()``."""

    hidden_matrices: dict[str, nn.Parameter] = field(default_factory=dict)
    """Two-dimensional weights that map features to features: decayed, and what Muon is for."""
    other_decayed: dict[str, nn.Parameter] = field(default_factory=dict)
    """Output heads, and weights of three and more dimensions (convolutions): decayed."""
    not_decayed: dict[str, nn.Parameter] = field(default_factory=dict)
    """Norms, biases and other vectors, and embeddings: rare rows would shrink without ever being used."""


def _find_embeddings(module: nn.Module) -> set[int]:
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(child.weight) for child in module.modules() if isinstance(child, tables)}


def _find_output_heads(module: nn.Module) -> set[int]:
    """Weights that a network declares as its output by the attribute ``output_weight_VD``."""
    heads = (getattr(child, "output_weight_VD", None) for child in module.modules())
    return {id(head) for head in heads if isinstance(head, Tensor)}


def group_parameters(module: nn.Module) -> ParameterGroups:
    """Sorts the trainable parameters of a module.

    An embedding is the weight of an ``nn.Embedding``, wherever else it is used: tied output weights count as one. An
    output head is what a network offers as ``output_weight_VD``. Frozen parameters are left out.

    Args:
        module: Whose parameters; shared ones are taken once, under their first name.

    Raises:
        ValueError: No parameter requires a gradient.
    """
    embeddings, heads = _find_embeddings(module), _find_output_heads(module)
    groups = ParameterGroups()
    num_frozen = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            num_frozen += 1
        elif parameter.ndim < 2 or id(parameter) in embeddings:
            groups.not_decayed[name] = parameter
        elif parameter.ndim == 2 and id(parameter) not in heads:
            groups.hidden_matrices[name] = parameter
        else:
            groups.other_decayed[name] = parameter
    if not (groups.hidden_matrices or groups.other_decayed or groups.not_decayed):
        raise ValueError(
            f"{type(module).__name__} has no parameter to train ({num_frozen} are frozen): "
            "unfreeze some, or leave the optimizer out"
        )
    return groups


def match_names(parameters: dict[str, nn.Parameter], patterns: list[str]) -> set[str]:
    """Names that match at least one glob.

    Args:
        parameters: By name.
        patterns: Globs; ``*`` also matches dots.

    Raises:
        ValueError: A pattern matches nothing.
    """
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name in parameters if fnmatchcase(name, pattern)}
        if not names:
            raise ValueError(
                f"adamw_parameters: {pattern!r} matches none of the {len(parameters)} matrices; "
                f"there are: {', '.join(parameters)}"
            )
        matched |= names
    return matched
