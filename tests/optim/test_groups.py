import pytest
from torch import nn

from nemo_like.optim.groups import group_parameters


class Language(nn.Module):
    """Embedding, a convolution, a projection, a norm, and a head that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.mix = nn.Conv1d(4, 4, 3)
        self.project = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 11, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    @property
    def output_weight_VD(self):
        return self.output.weight


class Wrapper(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


@pytest.mark.parametrize("tied", [True, False])
def test_norms_biases_and_embeddings_do_not_decay_and_a_head_is_no_hidden_matrix(tied):
    groups = group_parameters(Wrapper(Language(tied=tied)))
    assert list(groups.hidden_matrices) == ["network.project.weight"]
    assert list(groups.other_decayed) == ["network.mix.weight"] + (
        [] if tied else ["network.output.weight"]
    )
    assert list(groups.not_decayed) == [
        "network.embedding.weight",
        "network.mix.bias",
        "network.project.bias",
        "network.norm.weight",
        "network.norm.bias",
    ]


def test_a_tied_weight_counts_as_an_embedding_under_whichever_name_comes_first():
    module = nn.Module()
    module.output = nn.Linear(4, 11, bias=False)
    module.embedding = nn.Embedding(11, 4)
    module.embedding.weight = module.output.weight
    groups = group_parameters(module)
    assert list(groups.not_decayed) == ["output.weight"]
    assert not groups.hidden_matrices


def test_frozen_parameters_are_left_out():
    module = Language(tied=False)
    module.embedding.requires_grad_(False)
    module.project.requires_grad_(False)
    groups = group_parameters(module)
    assert not groups.hidden_matrices
    assert "embedding.weight" not in groups.not_decayed


def test_a_module_without_anything_to_train_is_refused():
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear has no parameter to train \(2 are frozen\)"):
        group_parameters(module)
