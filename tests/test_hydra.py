"""Hydra: each head is told the tokens before the one that it guesses."""

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling, overlap
from specdec_lite.drafters.hydra import HydraDrafter, HydraHeads
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.training import heads as training


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_target(seed=0, vocab=11):
    """Random weights, large enough for the text to matter, in float64."""
    config = GPT2Config(vocab_size=vocab, positions=40, width=16, layers=2, heads=2)
    target = GPT2.random(config, seed=seed, dtype=torch.float64)
    for name, parameter in target.named_parameters():
        if "norm" not in name:
            parameter.data *= 15
    return target


def random_heads(heads=3, seed=0):
    made = HydraHeads(16, heads).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made.requires_grad_(False)


def text_of(target, drafter, *, K, sampling=GREEDY, randomness=None, prompt=(3, 1, 4), new=20):
    randomness = randomness or TorchRandomness.seeded(0)
    rounds = decode(target, drafter, prompt, max_new_tokens=new, K=K, sampling=sampling, randomness=randomness)
    return [token for round in rounds for token in round.tokens]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_that_of_plain_decoding(seed):
    target = small_target(seed)
    plain = text_of(target, None, K=0)
    for K in (1, 3, 5):
        assert text_of(target, HydraDrafter(target, random_heads(seed=seed)), K=K) == plain


def test_the_law_of_the_text_is_the_targets():
    target = small_target(1, vocab=3)

    def law(drafter, K):
        def run(randomness):
            options = {"sampling": Sampling(), "randomness": randomness, "prompt": (0, 2), "new": 3}
            return tuple(text_of(target, drafter, K=K, **options))

        return enumerate_outcomes(run)

    own, drafted = law(None, 0), law(HydraDrafter(target, random_heads(2)), 2)
    assert max(abs(own[text] - drafted.get(text, 0)) for text in own) < 1e-12


def test_a_head_reads_the_last_committed_token_and_the_draft_so_far():
    target, heads = small_target(), random_heads()
    drafter = HydraDrafter(target, heads)
    drafter.start(10)
    drafter.feature = torch.ones(16, dtype=torch.float64)
    draft = drafter.propose(torch.tensor([5, 8]), 3, Sampling(), TorchRandomness.seeded(0))
    told = [8, *draft.tokens.tolist()]
    for i in range(3):
        inputs = torch.cat([drafter.feature, *target.token_embedding(torch.tensor(told[: i + 1]))])
        guess = drafter.feature + torch.nn.functional.silu(heads.linears[i](inputs))
        assert torch.allclose(draft.probs[i], target.logits(guess).softmax(-1), atol=1e-12, rtol=0)


def test_a_head_that_knows_the_tokens_between_learns_more_than_one_that_does_not():
    target = small_target(4).float()
    windows = training.sample_text(target, 0, rows=60, length=24, seed=0)
    features = training.features_of(target, windows)
    parts = [(windows[:48], features[:48]), (windows[48:], features[48:])]
    heads = HydraHeads(16, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LENGTH", 12)
        told = training.train_hydra(heads, target, *parts, steps=60, lr=0.1)
        blind = training.train_medusa(
            training.MedusaHeads(16, 2), target, features[:48], features[48:], steps=60, lr=0.1
        )
    assert told[-1]["loss"] < blind[-1]["loss"]
    assert told[-1]["alpha"][0] > blind[-1]["alpha"][0]

    # From the feature at t and the tokens t + 1 and t + 2 the second head guesses the law at t + 2.
    held_out, embedded = features[48:], target.token_embedding(windows[48:])
    with torch.no_grad():
        p = target.logits(held_out).softmax(-1)
        q = target.logits(heads(held_out[:, :22], torch.stack([embedded[:, 1:23], embedded[:, 2:24]], 2))).softmax(-1)
    assert told[-1]["alpha"][1] == pytest.approx(overlap(p[:, 2:24], q).mean().item(), abs=1e-5)
