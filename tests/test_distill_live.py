"""A draft made live: its losses, what it learns from, and that it becomes better and stays exact."""

import dataclasses

import pytest
import torch

from specdec_lite import GREEDY, autoregressive, speculative
from specdec_lite.distributions import overlap
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import Pair
from specdec_lite.training.distill import LOSSES, forward_kl, reverse_kl, variation
from specdec_lite.training.live import HELD_OUT, INITIAL_SCALE, Lesson, distill_live, new_draft, write_lesson

START, VOCAB, LENGTH = 5, 12, 16


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target():
    """Sharper than random weights are, so that there is something to learn."""
    model = GPT2.random(GPT2Config(VOCAB, 24, 16, 2, 2), seed=1)
    model.token_embedding.weight.mul_(25)
    return model


@pytest.fixture(scope="module")
def lesson(target):
    return write_lesson(target, START, rows=HELD_OUT + 32, length=LENGTH, seed=2)


SMALL = {"width": 8, "heads": 2, "steps": 60, "rows": 16, "lr": 2e-2}


# The losses


def test_reverse_kl_is_the_one_computed_by_hand():
    p, q = torch.tensor([[[0.5, 0.5], [0.75, 0.25]]]), torch.tensor([[[0.9, 0.1], [0.5, 0.5]]])
    # 0.9 ln(9/5) + 0.1 ln(1/5) = 0.36806 and 0.5 ln(2/3) + 0.5 ln 2 = 0.14384.
    assert reverse_kl(q.log(), p).item() == pytest.approx((0.368064 + 0.143841) / 2, abs=1e-5)
    assert reverse_kl(q.log(), p).item() == pytest.approx(forward_kl(p.log(), q).item(), abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_0_when_q_is_p_and_above_0_else(name):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert LOSSES[name](logits, logits.softmax(-1)).item() == pytest.approx(0, abs=1e-6)
    assert LOSSES[name](logits.flip(-1), logits.softmax(-1)).item() > 0.01


def test_forward_kl_covers_and_reverse_kl_chooses():
    """Two modes, and a q that has room for one: forward KL prefers to cover both, reverse KL to sit on one of them."""
    p = torch.tensor([[[0.49, 0.02, 0.49]]])
    broad, on_one = torch.tensor([[[1 / 3] * 3]]).log(), torch.tensor([[[0.96, 0.02, 0.02]]]).log()
    assert forward_kl(broad, p) < forward_kl(on_one, p)
    assert reverse_kl(on_one, p) - reverse_kl(broad, p) < forward_kl(on_one, p) - forward_kl(broad, p)


# The lesson


def test_a_lesson_is_the_targets_own_text_and_its_laws(target, lesson):
    assert lesson.tokens.shape == (HELD_OUT + 32, LENGTH)
    assert (lesson.tokens[:, 0] == START).all()
    p = target(lesson.tokens, target.new_cache(LENGTH, len(lesson.tokens))).softmax(-1)
    assert lesson.logits.dtype == torch.float16
    assert torch.allclose(lesson.logits.float().softmax(-1), p, atol=2e-3)
    drawn = p[:, :-1].gather(-1, lesson.tokens[:, 1:, None])
    assert drawn.mean() > p.square().sum(-1).mean() - 0.05  # what is drawn from p has p on average sum p^2
    assert torch.equal(lesson.tokens, write_lesson(target, START, rows=HELD_OUT + 32, length=LENGTH, seed=2).tokens)
    assert not torch.equal(lesson.tokens, write_lesson(target, START, rows=HELD_OUT + 32, length=LENGTH, seed=3).tokens)


@pytest.mark.parametrize("sizes", [{"rows": HELD_OUT}, {"rows": 20, "length": 25}, {"rows": 20, "length": 0}])
def test_a_lesson_that_cannot_be_is_refused(target, sizes):
    with pytest.raises(ValueError, match="rows are kept|those are kept"):
        write_lesson(target, START, **sizes)


# The draft


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_raises_alpha(name, target, lesson):
    draft, curve = distill_live(target, lesson, LOSSES[name], **SMALL)
    assert curve[-1].alpha > curve[0].alpha + 0.1
    assert curve[-1].loss < curve[0].loss
    assert not draft.training
    assert not any(parameter.requires_grad for parameter in draft.parameters())


def test_the_curve_begins_before_training_and_has_ten_points_more(target, lesson):
    draft, curve = distill_live(target, lesson, variation, **SMALL)
    assert [point.step for point in curve] == list(range(0, 61, 6))
    p = lesson.logits[-HELD_OUT:].float().softmax(-1)
    q = draft(lesson.tokens[-HELD_OUT:], draft.new_cache(LENGTH, HELD_OUT)).softmax(-1)
    assert curve[-1].alpha == pytest.approx(overlap(p, q).mean().item(), abs=0.01)  # autocast rounds
    assert curve[-1].loss == pytest.approx(1 - curve[-1].alpha, abs=1e-6)


def test_a_run_repeats_itself_and_leaves_target_and_generators_alone(target, lesson, global_generators):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    global_generators.seed(0)
    state = global_generators.state()
    draft, curve = distill_live(target, lesson, **SMALL)
    assert global_generators.state() == state
    again, same_curve = distill_live(target, lesson, **SMALL)
    assert curve == same_curve
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_the_held_out_rows_teach_nothing(target, lesson):
    spoiled = Lesson(lesson.tokens.clone(), lesson.logits.clone())
    spoiled.tokens[-HELD_OUT:] = START
    spoiled.logits[-HELD_OUT:] = 0
    draft, _ = distill_live(target, lesson, **SMALL)
    other, _ = distill_live(target, spoiled, **SMALL)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), other.parameters(), strict=True))


def test_positions_that_the_lesson_is_too_short_for_are_learned_too(target, lesson):
    draft, _ = distill_live(target, lesson, **SMALL)
    fresh = new_draft(target, layers=1, width=8, heads=2, seed=0)
    moved = draft.position_embedding.weight - fresh.position_embedding.weight
    assert (moved.abs().sum(-1) > 0).all()


def test_a_draft_has_the_sizes_asked_for_and_starts_from_the_targets_embedding(target):
    draft = new_draft(target, layers=3, width=8, heads=2, seed=0)
    assert (draft.config.layers, draft.config.width, draft.config.heads) == (3, 8, 2)
    assert (draft.vocab_size, draft.context) == (target.vocab_size, target.context)
    assert draft.token_embedding.weight.std().item() == pytest.approx(INITIAL_SCALE, rel=1e-3)
    alike = GPT2.random(target.config, seed=1)
    alike.token_embedding.weight[7] = alike.token_embedding.weight[3]
    embedding = new_draft(alike, layers=1, width=8, heads=2, seed=0).token_embedding.weight
    assert torch.allclose(embedding[3], embedding[7], atol=1e-6)


@pytest.mark.parametrize("sizes", [{"width": 32}, {"width": 9, "heads": 2}])
def test_sizes_that_cannot_be_are_refused(target, lesson, sizes):
    with pytest.raises(ValueError, match="the draft's width is"):
        distill_live(target, lesson, **sizes)


def test_decoding_with_it_gives_the_targets_own_text(target, lesson):
    draft, _ = distill_live(target, lesson, **SMALL)
    pair = dataclasses.replace(Pair("live", target, target, None), draft=draft)
    options = {"max_new_tokens": 18, "sampling": GREEDY}
    assert speculative(pair, [START], K=3, **options).tokens == autoregressive(pair, [START], **options).tokens
