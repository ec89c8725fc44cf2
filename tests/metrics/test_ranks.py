import pytest

from nemo_like.metrics.ranks import gather_from_ranks
from nemo_like.testing.world import run_world


def test_one_rank_needs_no_process_group():
    assert gather_from_ranks({"a": [1.5]}, world_size=1) == [{"a": [1.5]}]


def test_another_size_than_the_process_group_is_refused():
    with pytest.raises(RuntimeError, match=r"world_size=3.*process group has 1"):
        gather_from_ranks([], world_size=3)


def gather(rank_items):
    import torch.distributed as dist

    return gather_from_ranks(rank_items[dist.get_rank()], world_size=2)


@pytest.mark.dist
def test_every_rank_gets_what_all_have_in_order_of_rank():
    items = [{"a": [0.1]}, {"b": [0.2, 0.3]}]
    assert run_world(2, gather, items) == [items, items]
