import torch

from nemo_like.nn.mask import build_mask, build_positions


def test_positions_restart_in_each_segment():
    segments_BT = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 7, 7, 7, 5]], dtype=torch.int32)
    expected = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 0]])
    assert torch.equal(build_positions(segments_BT), expected)


def test_one_document_without_a_window_needs_no_mask():
    assert build_mask(5) is None
    assert build_mask(5, window=5) is None


def test_window_counts_the_token_itself():
    mask = build_mask(4, window=2)
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert torch.equal(mask, expected[None, None])


def test_mask_stays_within_segment_window_and_past():
    segments_BT = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    mask = build_mask(5, segments_BT=segments_BT, window=2)
    assert mask.shape == (2, 1, 5, 5)
    for b in range(2):
        for i in range(5):
            for j in range(5):
                seen = j <= i and i - j < 2 and segments_BT[b, i] == segments_BT[b, j]
                assert mask[b, 0, i, j] == seen
