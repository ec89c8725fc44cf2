import json
import math

import numpy as np
import pytest
import torch

from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.evaluation import cut_windows, evaluate_bits_per_byte
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.metrics.compression import measure_gzip, measure_zstd
from nemo_like.testing.world import run_world
from nemo_like.text.tokenizer import Tokenizer, train_bpe

VOCAB = 300


def make_documents(num: int = 12) -> list[tuple[str, str]]:
    draw = np.random.default_rng(0)
    words = ["der", "größte", "Bär", "山", "naïve", "mill", "🙂", "return", "x"]
    return [
        (str(draw.choice(["a", "b", "c"])), " ".join(draw.choice(words, size=draw.integers(1, 60))))
        for _ in range(num)
    ]


def make_tokenizer() -> Tokenizer:
    return train_bpe([text for _, text in make_documents()], vocab_size=VOCAB)


def make_network(*, seed: int = 0, max_positions: int = 64) -> DecoderNetwork:
    torch.manual_seed(seed)
    shape = DecoderConfig(
        vocab_size=VOCAB + 20,  # padded, as real ones are
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=max_positions,
        init_std=0.3,
    )
    return DecoderNetwork(shape)


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_each_token():
    network, tokenizer, documents = make_network(), make_tokenizer(), make_documents()
    torch.nn.init.zeros_(network.embedding.weight)
    result = evaluate_bits_per_byte(
        network, tokenizer, documents, context=16, stride=5, batch_size=3
    )
    for subset in ("a", "b", "c"):
        texts = [text for name, text in documents if name == subset]
        num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        num_bytes = sum(len(text.encode("utf-8")) for text in texts)
        assert num_bytes > sum(map(len, texts)), "there are characters of several bytes"
        expected = num_tokens * math.log2(network.shape.vocab_size) / num_bytes
        assert result.model.by_subset[subset] == pytest.approx(expected, rel=1e-6)
        assert (result.num_documents[subset], result.num_bytes[subset]) == (len(texts), num_bytes)


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (7, 7), (7, 3), (64, 64), (64, 1)])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 20])
def test_windows_predict_each_token_once_from_what_the_context_holds(context, stride, length):
    ids = np.arange(100, 100 + length, dtype=np.int32)
    stored = [1, *ids.tolist()]
    windows = list(cut_windows(ids, subset="a", prefix_id=1, context=context, stride=stride))
    predicted = [
        token for window in windows for token in window.tokens[-window.num_targets :].tolist()
    ]
    assert predicted == ids.tolist()
    for number, window in enumerate(windows):
        read = window.tokens[:-1].tolist()
        end = stored.index(window.tokens[-1])
        assert read == stored[max(0, end - context) : end]
        if number and window is not windows[-1]:
            assert window.num_targets == stride
            assert len(read) == context


def test_the_figure_is_the_sum_over_windows_run_one_by_one():
    network, tokenizer, documents = make_network().double(), make_tokenizer(), make_documents()
    result = evaluate_bits_per_byte(
        network, tokenizer, documents, context=16, stride=12, batch_size=4
    )
    nats = 0.0
    network.requires_grad_(False)
    for _, text in documents:
        stored = [tokenizer.prefix_id, *tokenizer.encode(text)]
        for target in range(1, len(stored)):
            # The window that predicts this token ends with it, or with a later one.
            end = 16 if target <= 16 else 16 + 12 * math.ceil((target - 16) / 12)
            end = min(end, len(stored) - 1)
            read = torch.tensor([stored[max(0, end - 16) : target]])
            nats -= float(network(read)[0, -1].log_softmax(-1)[stored[target]])
    expected = nats / math.log(2) / sum(len(text.encode()) for _, text in documents)
    assert result.model.pooled == pytest.approx(expected, rel=1e-9)


def test_more_context_comes_with_a_smaller_stride():
    network, tokenizer = make_network(), make_tokenizer()
    figures = [
        evaluate_bits_per_byte(
            network, tokenizer, make_documents(), context=16, stride=stride
        ).model.pooled
        for stride in (None, 16, 4)
    ]
    assert figures[0] == figures[1] != figures[2]


def test_a_figure_does_not_depend_on_the_batch_beyond_rounding():
    network, tokenizer, documents = make_network().double(), make_tokenizer(), make_documents()
    one, many = (
        evaluate_bits_per_byte(network, tokenizer, documents, context=16, batch_size=size).model
        for size in (1, 50)
    )
    assert one.pooled == pytest.approx(many.pooled, rel=1e-12)


def test_the_network_is_left_in_its_mode_and_dropout_is_off():
    network, tokenizer, documents = make_network(), make_tokenizer(), make_documents()
    network.train()
    for layer in network.layers:
        layer.dropout = 0.5
    with_dropout = evaluate_bits_per_byte(network, tokenizer, documents, context=16)
    assert network.training
    network.eval()
    assert with_dropout == evaluate_bits_per_byte(network, tokenizer, documents, context=16)
    assert not network.training


def test_compressors_stand_beside_the_model():
    documents = make_documents()
    result = evaluate_bits_per_byte(make_network(), make_tokenizer(), documents, context=16)
    for name, measure in (("gzip -9", measure_gzip), ("zstd -19", measure_zstd)):
        figures = result.compressors[name]
        for subset, num_bytes in result.num_bytes.items():
            texts = [text.encode() for name, text in documents if name == subset]
            assert figures.by_subset[subset] == 8 * measure(texts) / num_bytes
        together = [
            text.encode()
            for subset in result.num_bytes
            for name, text in documents
            if name == subset
        ]
        assert figures.pooled == 8 * measure(together) / sum(result.num_bytes.values())


def test_a_section_has_a_row_for_each_subset_and_three_aggregates_by_name():
    documents = [*make_documents(), ("a", ""), ("never", "")]
    result = evaluate_bits_per_byte(
        make_network(), make_tokenizer(), documents, context=16, stride=8
    )
    section = result.to_section()
    assert section.table is not None
    assert section.table.columns == ["subset", "documents", "bytes", "model", "gzip -9", "zstd -19"]
    rows = {row[0]: row for row in section.table.rows}
    aggregates = ["all, pooled over bytes", "all, weighted mean", "all, plain mean"]
    assert list(rows) == ["a", "b", "c", *aggregates]
    assert [list(rows)[index] for index in section.table.emphasis] == list(rows)[3:]
    assert rows["all, pooled over bytes"][1:4] == [
        12,
        sum(len(text.encode()) for _, text in documents),
        result.model.pooled,
    ]
    assert rows["all, plain mean"][5] == result.compressors["zstd -19"].mean
    for part in (
        "Context 16 tokens, stride 8",
        "end of text (<|endoftext|>)",
        f"{make_tokenizer().vocab_size} tokens",
        "bytes, as no",
        "left out: 2",
    ):
        assert part in section.note
    assert (
        json.loads(json.dumps(result.to_dict()))["bits_per_byte"]["model"]["pooled"]
        == result.model.pooled
    )


def test_compression_can_be_left_out_and_a_mixture_given():
    result = evaluate_bits_per_byte(
        make_network(),
        make_tokenizer(),
        make_documents(),
        context=16,
        compression=False,
        mixture={"a": 1.0, "b": 2.0, "c": 5.0},
    )
    figures = result.model.by_subset
    assert result.compressors == {}
    assert result.model.weighted == pytest.approx(
        (figures["a"] + 2 * figures["b"] + 5 * figures["c"]) / 8
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 65}, "context=65: must be 1 to 64"),
        ({"context": 0}, "context=0: must be 1 to 64"),
        ({"context": 8, "stride": 9}, "stride=9: must be 1 to context=8"),
        ({"context": 8, "stride": 0}, "stride=0: must be 1 to context=8"),
        ({"context": 8, "batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"context": 99, "stride": 100}, r"(?s)context=99.*stride=100"),
    ],
)
def test_what_is_out_of_range_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_bits_per_byte(make_network(), make_tokenizer(), make_documents(), **options)


def test_a_corpus_without_text_is_refused():
    with pytest.raises(DataError, match="no text to evaluate: 1 documents"):
        evaluate_bits_per_byte(make_network(), make_tokenizer(), [("a", "")], context=8)


def evaluate_as_rank(world_size: int):
    import os

    return evaluate_bits_per_byte(
        make_network(),
        make_tokenizer(),
        make_documents(97),
        context=16,
        batch_size=2,
        rank=int(os.environ["RANK"]),
        world_size=world_size,
    )


@pytest.mark.dist
def test_one_two_and_three_ranks_find_exactly_the_same_on_97_documents():
    results = [each for size in (1, 2, 3) for each in run_world(size, evaluate_as_rank, size)]
    assert len(results) == 6
    assert all(each == results[0] for each in results)
    assert sum(results[0].num_documents.values()) == 97
