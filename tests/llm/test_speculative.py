# Shapes: V = vocabulary.
import copy
import dataclasses
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.generation import GenerationConfig, ModelDraft, PromptLookup
from nemo_like.collections.llm.generation.generate import generate, stream
from nemo_like.collections.llm.generation.request import Speculation
from nemo_like.collections.llm.generation.sampling import filter_logits
from nemo_like.collections.llm.generation.speculative import Proposal, summarize_speculation
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer, train_bpe

VOCAB = 257  # every byte, and the end of text
TOKENIZER = train_bpe(["ab"], vocab_size=VOCAB)
OFTEN = list(range(0, 250, 8))  # so many stop tokens that one is soon chosen


def make_network(seed=0, *, num_layers=2, vocab_size=VOCAB + 7, max_positions=96, **options):
    torch.manual_seed(seed)
    options = {"init_std": 0.5, **options}
    shape = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_layers=num_layers,
        num_heads=2,
        intermediate_size=32,
        max_positions=max_positions,
        **options,
    )
    return DecoderNetwork(shape)


def disturb(network, std):
    """A network that often agrees."""
    other = copy.deepcopy(network)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += std * torch.randn_like(parameter)
    return other


def make_smaller(network):
    """Its first layer."""
    shape = dataclasses.replace(network.shape, num_layers=1)
    smaller = DecoderNetwork(shape)
    smaller.load_state_dict(network.state_dict(), strict=False)
    return smaller


NETWORK = make_network()
DRAFTS = {
    "same": NETWORK,
    "similar": disturb(NETWORK, 0.02),
    "smaller": make_smaller(NETWORK),
    "random": make_network(9, num_layers=1),
}


def make_draft(kind, num_tokens):
    if kind == "lookup":
        return PromptLookup(num_tokens=num_tokens, min_ngram=1)
    return ModelDraft(DRAFTS[kind], TOKENIZER, num_tokens=num_tokens)


def draw_prompts(count, seed):
    """Of unequal length, some with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 12, (count,), generator=generator).tolist()
    prompts = [torch.randint(256, (size,), generator=generator).tolist() for size in sizes]
    return [it * 2 if index % 3 == 0 else it for index, it in enumerate(prompts)]


def greedy(**options):
    return GenerationConfig(temperature=0, ignore_eos=True, **{"max_tokens": 12, **options})


def assert_equal_results(results, expected):
    for result, plain in zip(results, expected, strict=True):
        assert result.tokens == plain.tokens
        assert result.text == plain.text
        assert (result.finish_reason, result.stopped_by) == (
            plain.finish_reason,
            plain.stopped_by,
        )
        assert (result.logprobs is None) == (plain.logprobs is None)
        for one, other in zip(result.logprobs or [], plain.logprobs or [], strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", [*DRAFTS, "lookup"])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_greedy_tokens_are_those_without_a_draft(kind, num_tokens):
    draft = make_draft(kind, num_tokens)
    for size in (1, 2, 3, 4):  # 400 prompts over all cases
        prompts = draw_prompts(size, seed=10 * num_tokens + size)
        plain = generate(NETWORK, TOKENIZER, prompts, greedy())
        results = generate(NETWORK, TOKENIZER, prompts, greedy(), draft=draft)
        assert_equal_results(results, plain)
        total = summarize_speculation(results)
        if kind == "same":
            assert total.acceptance_rate == 1
            assert total.passes == size * -(-11 // (num_tokens + 1))


def test_drafts_are_accepted_as_far_as_they_agree():
    prompts = draw_prompts(8, seed=1)
    rates = {}
    for kind in DRAFTS:
        results = generate(
            NETWORK, TOKENIZER, prompts, greedy(max_tokens=32), draft=make_draft(kind, 4)
        )
        rates[kind] = summarize_speculation(results).acceptance_rate
    assert rates["random"] < rates["similar"] < rates["same"] == 1
    assert rates["random"] < 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"stop_tokens": OFTEN, "logprobs": 2},
        {"stop": ["e", "t", "\x07"]},
        {"repetition_penalty": 1.5, "logprobs": 0},
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["same", "similar", "lookup"])
def test_texts_end_inside_a_stretch_of_guesses_as_they_do_without(kind, options):
    prompts = draw_prompts(12, seed=5)
    config = greedy(**{"max_tokens": 30, **options})
    plain = generate(NETWORK, TOKENIZER, prompts, config)
    results = generate(NETWORK, TOKENIZER, prompts, config, draft=make_draft(kind, 8))
    assert_equal_results(results, plain)
    if "stop" in options or "stop_tokens" in options:
        # Rows leave the batch at different times, so others take their places, in both caches.
        assert len({len(result.tokens) for result in results}) > 2


def test_the_window_of_a_model_holds_for_guesses():
    network = make_network(sliding_window=4)
    prompts = draw_prompts(3, seed=2)
    plain = generate(network, TOKENIZER, prompts, greedy(max_tokens=24))
    draft = ModelDraft(disturb(network, 0.02), TOKENIZER, num_tokens=5)
    assert_equal_results(
        generate(network, TOKENIZER, prompts, greedy(max_tokens=24), draft=draft), plain
    )


def test_a_text_may_fill_the_cache_to_its_last_place():
    # 5 + 8 - 1 places: the guesses do not need more.
    config = greedy(max_tokens=8, cache_size=12)
    prompt = [[1, 2, 3, 4, 5]]
    plain = generate(NETWORK, TOKENIZER, prompt, config)
    results = generate(NETWORK, TOKENIZER, prompt, config, draft=make_draft("same", 8))
    assert_equal_results(results, plain)


def test_a_stream_gives_the_same_text():
    (plain,) = generate(NETWORK, TOKENIZER, ["hello"], greedy(max_tokens=30))
    pieces = stream(NETWORK, TOKENIZER, "hello", greedy(max_tokens=30), draft=make_draft("same", 4))
    shown = []

    def show():
        shown.append((yield from pieces))

    assert "".join(show()) == plain.text
    assert shown[0].tokens == plain.tokens
    assert shown[0].speculation.accepted == 23  # 29 tokens in six passes


# What is drawn.


class ConstantDraft:
    """Is certain of the same token again and again."""

    num_tokens = 3

    def __init__(self, token):
        self.token = token

    def find_faults(self, tokenizer, *, cache_size):
        return iter(())

    def begin(self, requests, *, cache_size):
        return self

    def propose(self, requests, counts):
        return [Proposal([self.token] * count) for count in counts]

    def move(self, source, target):
        pass


@torch.no_grad()
def enumerate_texts(network, prompt, config):
    """Probability of each text of ``max_tokens`` tokens."""
    texts = {(): 1.0}
    for _ in range(config.max_tokens):
        tokens_BT = torch.tensor([[*prompt, *text] for text in texts])
        p_BV = filter_logits(network(tokens_BT)[:, -1, :VOCAB], config).double().softmax(-1)
        texts = {
            (*text, token): chance * float(p_V[token])
            for (text, chance), p_V in zip(texts.items(), p_BV, strict=True)
            for token in p_V.nonzero()[:, 0].tolist()
        }
    return texts


def measure_chi_square(counts, expected, number):
    """Deviations above what chance gives, in standard deviations; cells with few expected counts are put together."""
    rare, total, cells = [0.0, 0.0], 0.0, 0
    assert set(counts) <= set(expected)
    for text, chance in expected.items():
        if chance * number < 5:
            rare[0] += counts.get(text, 0)
            rare[1] += chance * number
            continue
        total += (counts.get(text, 0) - chance * number) ** 2 / (chance * number)
        cells += 1
    if rare[1] > 5:
        total, cells = total + (rare[0] - rare[1]) ** 2 / rare[1], cells + 1
    return (total - (cells - 1)) / (2 * (cells - 1)) ** 0.5


PROMPT = [5, 9, 31]
DRAWING = GenerationConfig(max_tokens=4, temperature=1.3, top_k=3, top_p=0.97, ignore_eos=True)
FLAT = make_network(init_std=0.4)


def make_drawing_draft(kind):
    if kind == "constant":
        # The commonest second token.
        texts = enumerate_texts(FLAT, PROMPT, dataclasses.replace(DRAWING, max_tokens=2))
        chances = {}
        for (_, token), chance in texts.items():
            chances[token] = chances.get(token, 0) + chance
        return ConstantDraft(max(chances, key=chances.__getitem__))
    network = disturb(FLAT, 0.03) if kind == "similar" else DRAFTS["random"]
    return ModelDraft(network, TOKENIZER, num_tokens=2)


@pytest.mark.parametrize("kind", ["similar", "random", "constant"])
def test_drawn_texts_have_the_distribution_of_the_model(kind):
    number, counts = 3000, {}
    results = generate(
        FLAT,
        TOKENIZER,
        [PROMPT] * number,
        DRAWING,
        seeds=range(number),
        draft=make_drawing_draft(kind),
    )
    for result in results:
        counts[tuple(result.tokens)] = counts.get(tuple(result.tokens), 0) + 1
    expected = enumerate_texts(FLAT, PROMPT, DRAWING)
    assert measure_chi_square(counts, expected, number) < 4
    if kind != "random":  # both branches were taken
        assert 0.05 < summarize_speculation(results).acceptance_rate < 0.9


def choose_wrongly(p, q):
    """What three wrong rules would give for one token."""
    both = torch.minimum(p, q)
    yield "take every guess", q
    yield "draw a refused guess again from p", both + (1 - both.sum()) * p
    refused = (p - q).clamp(min=0)
    yield "take a guess with probability p", q * p + (1 - (q * p).sum()) * refused / refused.sum()


def test_the_same_number_of_texts_tells_wrong_rules_apart():
    config = dataclasses.replace(DRAWING, max_tokens=1)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        p_V, q_V = (
            filter_logits(network(prompt)[:, -1, :VOCAB], config)[0].double().softmax(-1)
            for network in (FLAT, make_drawing_draft("similar").network)
        )
    for name, wrong_V in choose_wrongly(p_V, q_V):
        counts = {(token,): 3000 * float(wrong_V[token]) for token in range(VOCAB)}
        expected = {(token,): float(p_V[token]) + 1e-9 for token in range(VOCAB)}
        assert measure_chi_square(counts, expected, 3000) > 4, name


def test_a_seed_decides_whatever_the_neighbours_are():
    config = GenerationConfig(max_tokens=20, temperature=1.3, logprobs=1, stop_tokens=OFTEN)
    prompts = draw_prompts(6, seed=4)
    draft = make_draft("similar", 4)
    before = torch.get_rng_state()
    together = generate(NETWORK, TOKENIZER, prompts, config, seeds=range(6), draft=draft)
    for seed, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = generate(NETWORK, TOKENIZER, [prompt], config, seeds=[seed], draft=draft)
        assert_equal_results([result], [alone])
        assert result.speculation == alone.speculation
        assert result.seed == seed
    assert torch.equal(torch.get_rng_state(), before)


# Lookup, figures, refusals.


def test_lookup_guesses_what_followed_the_last_time_and_goes_round_in_loops():
    def find(text, count=5, **options):
        draft = PromptLookup(**options)
        (index,) = draft.begin([None], cache_size=0).indexes
        return index.find_next(text, count)

    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 2, 3]
    assert find(text) == [5, 6, 7, 2, 3]
    assert find([*text, 4]) == [9, 2, 3, 5, 6]  # three tokens are looked for first
    assert find([8, 1, 8, 2]) == []
    assert find([4, 4, 4]) == [4] * 5
    assert find([7, 1, 2, 1, 2, 1], count=4) == [2, 1, 2, 1]
    assert find([3, 1, 3], min_ngram=1, count=2) == [1, 3]
    assert find([3, 1, 3]) == []


def test_figures_of_the_speculation_are_in_the_result():
    (plain,) = generate(NETWORK, TOKENIZER, ["a"], greedy())
    assert plain.speculation is None
    (result,) = generate(NETWORK, TOKENIZER, ["a"], greedy(), draft=make_draft("same", 4))
    # 1 token with the prompt, then 5, 5 and 1.
    assert result.speculation == Speculation(passes=3, drafted=8, accepted=8)
    assert result.speculation.accepted_per_pass == pytest.approx(8 / 3)
    assert Speculation().acceptance_rate == Speculation().accepted_per_pass == 0


OTHER_EOS = Tokenizer(TOKENIZER.to_bytes(), bos_token=None, eos_token="a")
MERGED = [train_bpe([text], vocab_size=258) for text in ("xyxyxy", "abababab")]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: ModelDraft(NETWORK, MERGED[0], num_tokens=2),
            {},
            "vocabulary is not that of the model: it has 258 tokens, the model 257",
        ),
        (
            lambda: ModelDraft(NETWORK, OTHER_EOS),
            {},
            r"eos_id is \d+ in the model's and \d+ in the",
        ),
        (
            lambda: ModelDraft(make_network(vocab_size=200), TOKENIZER),
            {},
            "its network has 200 tokens, the tokenizer 257",
        ),
        (
            lambda: ModelDraft(make_network(max_positions=8), TOKENIZER),
            {},
            "is meant for 8 tokens, prompt and text need 13",
        ),
        (lambda: ModelDraft(NETWORK, TOKENIZER, num_tokens=0), {}, "draft_tokens=0: must be 1 to"),
        (lambda: PromptLookup(num_tokens=65), {}, "draft_tokens=65: must be 1 to 64"),
        (lambda: PromptLookup(min_ngram=4), {}, "min_ngram=4: must be at least 1 and at most"),
        (PromptLookup, {"num_beams": 2}, "num_beams=2: beams are not drafted"),
        (
            PromptLookup,
            {"cache_size": 8, "eviction_policy": "sliding_window"},
            "eviction_policy=sliding_window: what is evicted",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, options, message):
    options = {} if "num_beams" in options and options["num_beams"] == 1 else options
    base = {"max_tokens": 12} if "num_beams" in options else {"max_tokens": 12, "temperature": 0}
    with pytest.raises(ConfigError, match=message):
        generate(NETWORK, TOKENIZER, ["a"], GenerationConfig(**base, **options), draft=make())


def test_the_first_token_that_differs_is_named():
    pairs = itertools.permutations(MERGED)
    for draft, target in pairs:
        with pytest.raises(ConfigError, match=r"token '\w\w' is \d+ in the model's and not there"):
            generate(make_network(), target, ["a"], greedy(), draft=ModelDraft(NETWORK, draft))


def test_a_model_takes_a_draft():
    model = DecoderModel(network=NETWORK.shape)
    model.tokenizer = TOKENIZER
    plain = model.generate(["ab"], greedy())
    results = model.generate(["ab"], greedy(), draft=make_draft("random", 3))
    assert_equal_results(results, plain)


# The commands.

ROOT = Path(__file__).resolve().parents[2]


def load_script(path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(monkeypatch, *argv):
    script = ROOT / "examples" / "llm" / "generate.py"
    monkeypatch.setattr(sys, "argv", [str(script), "model", *argv])
    load_script(script).main()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    networks = {"model": (NETWORK, TOKENIZER), "smaller": (DRAFTS["smaller"], TOKENIZER)}
    networks["other"] = (make_network(), MERGED[0])
    for name, (network, tokenizer) in networks.items():
        save_hf_folder(
            tmp_path / name,
            network.shape,
            network.state_dict(),
            tokenizer_files=tokenizer.to_bytes(),
            eos_token_id=tokenizer.eos_id,
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("draft", ["smaller", "prompt-lookup", "model"])
def test_the_command_streams_the_same_text_and_prints_how_much_was_accepted(
    folder, monkeypatch, capsys, draft
):
    argv = ["--prompt", "abab", "temperature=0", "max_tokens=12", "--ignore-eos"]
    run_main(monkeypatch, *argv)
    plain = capsys.readouterr()
    run_main(monkeypatch, *argv, "--draft", draft, "draft_tokens=3")
    shown = capsys.readouterr()
    assert shown.out == plain.out
    assert "guesses accepted" in shown.err
    assert "guesses" not in plain.err
    if draft == "model":
        assert "8 of 8 guesses accepted (100.0%), 2.67 a pass" in shown.err


def test_lines_of_the_command_hold_the_figures(folder, monkeypatch, capsys):
    argv = ["--prompt", "a", "--prompt", "b", "temperature=0", "max_tokens=9", "--ignore-eos"]
    run_main(monkeypatch, *argv, "--json", "--draft", "model")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # 1 token with the prompt, 5, and 3.
    assert [line["speculation"] for line in lines] == [
        {"passes": 2, "drafted": 6, "accepted": 6}
    ] * 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft-tokens", "3"], "draft_tokens=3: has no effect without draft"),
        (["--draft", "prompt-lookup", "draft_tokens=0"], "draft_tokens=0: must be 1 to 64"),
        (["--draft", "other"], "it has 258 tokens, the model 257"),
    ],
    ids=str,
)
def test_wrong_drafts_are_named_by_the_command(folder, monkeypatch, capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, "--prompt", "a", "max_tokens=4", *argv)
    assert message in capsys.readouterr().err


def test_a_draft_is_made_of_the_first_blocks(folder):
    truncate = load_script(ROOT / "tools" / "truncate_draft.py").truncate
    count = truncate(folder / "model", folder / "draft", num_layers=1)
    draft = DecoderModel.load(folder / "draft")
    assert draft.tokenizer.content_hash == TOKENIZER.content_hash
    expected = make_smaller(NETWORK).state_dict()
    assert count == sum(it.numel() for it in draft.network.parameters())
    for name, tensor in draft.network.state_dict().items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(SystemExit, match="--layers 2: must be at least 1 and below 2"):
        truncate(folder / "model", folder / "other", num_layers=2)
