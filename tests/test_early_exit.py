"""Early exit: the target's first layers draft in the target's own cache, and leave it as they found it."""

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling, overlap
from specdec_lite.drafters.early_exit import EarlyExitDrafter, ExitHead, early_states
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.training import heads as training

CONFIG = GPT2Config(vocab_size=11, positions=32, width=16, layers=3, heads=2)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_target(seed=0, scale=10.0, **sizes):
    """Random weights, large enough for the text to matter, in float64."""
    target = GPT2.random(GPT2Config(**(vars(CONFIG) | sizes)), seed=seed, dtype=torch.float64)
    for name, parameter in target.named_parameters():
        if "norm" not in name:
            parameter.data *= scale
    return target


def rounds_of(target, drafter, *, K, sampling=GREEDY, seed=0, new=20, prompt=(3, 1, 4)):
    randomness = TorchRandomness.seeded(seed)
    return [*decode(target, drafter, prompt, max_new_tokens=new, K=K, sampling=sampling, randomness=randomness)]


def tokens_of(rounds):
    return [token for round in rounds for token in round.tokens]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", [1, 2])
def test_greedy_text_is_that_of_plain_decoding(layers, seed):
    target = small_target(seed)
    drafter = EarlyExitDrafter(target, ExitHead.untrained(target, layers))
    plain = tokens_of(rounds_of(target, None, K=0))
    for K in (1, 2, 4):
        rounds = rounds_of(target, drafter, K=K)
        assert tokens_of(rounds) == plain
        assert len(rounds[0].draft_tokens) == K  # the first round drafts too: the early layers read the prompt


def test_the_law_of_the_text_is_the_targets():
    target = small_target(1, vocab_size=3)
    drafter = EarlyExitDrafter(target, ExitHead.untrained(target, 1))

    def law(drafter, K):
        def run(randomness):
            options = {"sampling": Sampling(), "randomness": randomness}
            return tuple(tokens_of(decode(target, drafter, [0, 2], max_new_tokens=3, K=K, **options)))

        return enumerate_outcomes(run)

    own, drafted = law(None, 0), law(drafter, 2)
    assert max(abs(own[text] - drafted.get(text, 0)) for text in own) < 1e-12


def test_text_up_to_the_end_of_the_context_is_that_of_plain_decoding():
    target = small_target(2, positions=12)
    drafter = EarlyExitDrafter(target, ExitHead.untrained(target, 1))
    assert tokens_of(rounds_of(target, drafter, K=4)) == tokens_of(rounds_of(target, None, K=0))


def drafting(target, layers, context, K, read=0):
    """A drafter with a cache that holds ``read`` tokens, and what it drafts."""
    drafter = EarlyExitDrafter(target, ExitHead.untrained(target, layers))
    observed = drafter.observe(target)
    cache = observed.new_cache(len(context) + K)
    if read:
        observed(context[None, :read], cache)
    drafter.start(len(context) + K)
    return drafter, cache, drafter.propose(context, K, Sampling(), TorchRandomness.seeded(0))


@pytest.mark.parametrize("read", [0, 4])
def test_drafting_leaves_the_caches_length_alone_and_the_target_writes_the_same_again(read):
    target, context, K = small_target(), torch.tensor([3, 1, 4, 1, 5]), 3
    _, cache, draft = drafting(target, 2, context, K, read)
    assert cache.lengths == [read]
    fed = slice(read, len(context) + K - 1)  # the last draft token was drawn and not fed
    drafted = [block[0, fed].clone() for block in (*cache.keys[:2], *cache.values[:2])]
    assert all(block.abs().max() > 0 for block in drafted)
    assert cache.keys[2][0, read:].abs().max() == 0  # the later layers did not run
    target(torch.cat([context, draft.tokens])[None, read:], cache)
    for before, after in zip(drafted, (*cache.keys[:2], *cache.values[:2]), strict=True):
        assert (before - after[0, fed]).abs().max() < 1e-12


def test_what_is_read_already_is_not_read_again():
    target, context = small_target(), torch.tensor([3, 1, 4, 1, 5])
    fed = []
    target.blocks[0].register_forward_hook(lambda block, inputs, output: fed.append(output.shape[1]))
    _, _, draft = drafting(target, 1, context, 3, read=4)
    assert fed == [4, 1, 1, 1]  # the target's own pass, then the last committed token and the draft's first two
    assert len(draft.tokens) == 3


@pytest.mark.parametrize("read", [0, 4])
@pytest.mark.parametrize("layers", [1, 2])
def test_q_is_what_the_first_layers_say_of_the_text_so_far(layers, read):
    target, context, K = small_target(3), torch.tensor([3, 1, 4, 1, 5]), 3
    _, _, draft = drafting(target, layers, context, K, read)
    # The same target with its later layers taken off.
    short = GPT2(GPT2Config(**(vars(target.config) | {"layers": layers}))).double()
    short.load_state_dict({name: tensor for name, tensor in target.state_dict().items() if name in short.state_dict()})
    with torch.no_grad():
        logits = short(torch.cat([context, draft.tokens[:-1]])[None], short.new_cache(20), last=K)[0]
    assert torch.allclose(draft.probs, logits.softmax(-1), atol=1e-12, rtol=0)


def test_a_trained_exit_agrees_more_with_the_target_than_an_untrained_one(tmp_path):
    target = small_target(4, scale=8.0).float()
    windows = training.sample_text(target, 0, rows=40, length=32, seed=0)
    states, features = training.states_of(target, 1, windows), training.features_of(target, windows)
    head = ExitHead.untrained(target, 1)
    with torch.no_grad():
        p = target.logits(features[32:]).softmax(-1)
        untrained = overlap(p, target.logits(head(states[32:])).softmax(-1)).mean()
    parts = [(states[:32], features[:32]), (states[32:], features[32:])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LENGTH", 24)
        log = training.train_exit(head, target, *parts, steps=80, lr=0.03)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    with torch.no_grad():
        trained = overlap(p, target.logits(head(states[32:])).softmax(-1)).mean()
    assert trained > untrained + 0.02
    assert log[-1]["alpha"] == pytest.approx([trained.item()], abs=1e-5)


def test_an_exit_comes_back_as_it_was_saved_with_its_number_of_layers(tmp_path):
    target, path = small_target(), tmp_path / "exit.safetensors"
    head = ExitHead.untrained(target, 2)
    head.linear.weight.data += 0.25
    head.save(path, target)
    back = ExitHead.load(target, path)
    assert back.layers == 2 and back.linear.weight.dtype == torch.float64
    assert torch.equal(back.linear.weight, head.linear.weight)
    states = torch.randn(3, 16, dtype=torch.float64)
    assert torch.allclose(back(states), head(states), atol=1e-3)
    with pytest.raises(ValueError, match="trained for another target"):
        ExitHead.load(small_target(1), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="cut short"):
        ExitHead.load(target, path)


def test_what_does_not_fit_is_refused():
    target = small_target()
    for layers in (0, 3):
        with pytest.raises(ValueError, match=f"layers is {layers}; random has 3"):
            ExitHead.untrained(target, layers)
    drafter = EarlyExitDrafter(target, ExitHead.untrained(target, 1))
    with pytest.raises(ValueError, match="this drafter was made for random: make one for"):
        rounds_of(small_target(1), drafter, K=2)


def test_states_in_pieces_are_the_states_at_once():
    target, tokens = small_target(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    whole = early_states(target, 2, tokens, target.new_cache(6))
    cache = target.new_cache(6)
    pieces = torch.cat([early_states(target, 2, part, cache) for part in tokens.split([3, 1, 2], dim=1)], 1)
    assert torch.allclose(whole, pieces, atol=1e-12, rtol=0)
    assert cache.length == 6
