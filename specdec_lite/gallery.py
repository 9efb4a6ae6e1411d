"""The gallery of wrong rules: slips that look like speculative sampling, run without an error, and bend the law.

Every entry has the shape of the right rule, so the shipped decoding loop can run it, and a losslessness check must
reject it. A slip sits in one of two places: in the verification (``verify``), or in the proposal, where tokens are
drawn from something other than the q that is reported (``proposes_from``). ``first_token_law`` and ``output_law`` give
the exact law that a rule leads to.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import keep_top_p, one_hot, residual
from .randomness import Randomness, enumerate_outcomes
from .verify import Verification, Verify, verify

# In the rules below d are the draft tokens and q, p the rows of draft and target probabilities: the arguments of
# ``verify``, under the names of the formulas. Each rule says in its last lines which token follows the n accepted ones.


def rows(d: Int[Tensor, " K"], q: Float[Tensor, "K vocab"] | None, p: Float[Tensor, "K+1 vocab"]):
    """q for all K + 1 positions: point masses where none is reported, and zeros after the last draft token.

    So ``residual(p[n], q[n])`` is right for a rejection at n < K and for the bonus token at n = K.
    """
    reported = one_hot(d, like=p[: len(d)]) if q is None else q
    return torch.cat([reported, torch.zeros_like(p[:1])])


def ratios(d: Int[Tensor, " K"], q: Float[Tensor, "K+1 vocab"], p: Float[Tensor, "K+1 vocab"]) -> Float[Tensor, " K"]:
    """p/q at each draft token: the right chance of acceptance (where it is above 1, acceptance is certain)."""
    each = torch.arange(len(d), device=d.device)
    return p[each, d] / q[each, d]


def softmaxed_residual(d, q, p, randomness: Randomness) -> Verification:
    """The residual max(0, p - q) is made to sum to 1 by a softmax instead of by division.

    A softmax gives every token some probability, also those where nothing is left over (exp(0) = 1). It is made where a
    helper that "turns scores into probabilities" is at hand and the residual is passed to it.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    recovered = (p[n] - q[n]).clamp(min=0).softmax(-1)
    return Verification(n, randomness.categorical(recovered if n < len(d) else p[n]), drafted=len(d))


def no_residual(d, q, p, randomness: Randomness) -> Verification:
    """After a rejection the next token is drawn from p itself: nothing is subtracted.

    A token can then come twice: as an accepted draft, and once more from the resampling. It is made by reading
    "rejected, so sample from the target" literally.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    return Verification(n, randomness.categorical(p[n]), drafted=len(d))


def partial_residual(d, q, p, randomness: Randomness) -> Verification:
    """q is subtracted from p at the rejected token only, not at every token.

    It is right when the draft is a point mass, and made by carrying the code for deterministic drafts over to sampled
    ones.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    at_draft_tokens = q * rows(d, None, p)
    return Verification(n, randomness.categorical(residual(p[n], at_draft_tokens[n])), drafted=len(d))


def recovered_from_draft(d, q, p, randomness: Randomness) -> Verification:
    """After a rejection the next token is drawn from q, the draft's distribution.

    It is made by swapping the two models' rows, or by letting the draft "try again".
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    return Verification(n, randomness.categorical(q[n] if n < len(d) else p[n]), drafted=len(d))


def shifted_residual(d, q, p, randomness: Randomness) -> Verification:
    """The residual takes p from one row too far: that of the position after the rejected one.

    Row i of p predicts the token that follows i draft tokens; whoever indexes the logits by the position of the token
    that was *fed* is off by one. It does no harm where p is the same at every position, so a test on one fixed
    distribution misses it.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    return Verification(n, randomness.categorical(residual(p[min(n + 1, len(d))], q[n])), drafted=len(d))


def bonus_from_draft(d, q, p, randomness: Randomness) -> Verification:
    """When every draft token is accepted, the extra token is drawn from the draft's last row.

    The first token of each round is right, so a test of one token per round misses it. It is made by handing the loop's
    last q to the final draw.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(ratios(d, q, p)))
    everything_accepted = 0 < n == len(d)
    return Verification(
        n, randomness.categorical(q[n - 1] if everything_accepted else residual(p[n], q[n])), drafted=len(d)
    )


def swapped_ratio(d, q, p, randomness: Randomness) -> Verification:
    """The chance of acceptance is min(1, q/p) instead of min(1, p/q).

    Some texts call the draft p and the target q; mixing two of them turns the fraction upside down.
    """
    q = rows(d, q, p)
    n = int(randomness.first_failure(1 / ratios(d, q, p)))
    return Verification(n, randomness.categorical(residual(p[n], q[n])), drafted=len(d))


def one_uniform(d, q, p, randomness: Randomness) -> Verification:
    """One uniform number decides about all positions of the round, instead of one number for each.

    All K are then accepted with the chance of the least likely one, not with the product. It is made by drawing ``u``
    outside the loop. The first token keeps its law; the tokens after it do not.
    """
    q = rows(d, q, p)
    # u is below the first i ratios just when it is below their minimum; so n = i has the chance that is lost there.
    smallest = ratios(d, q, p).clamp(max=1).cummin(0).values
    one, zero = p.new_ones(1), p.new_zeros(1)
    n = int(randomness.categorical(torch.cat([one, smallest]) - torch.cat([smallest, zero])))
    return Verification(n, randomness.categorical(residual(p[n], q[n])), drafted=len(d))


def first_unverified(d, q, p, randomness: Randomness) -> Verification:
    """The first draft token is kept without being verified; the others are treated well.

    The target's row for it comes from the token *before* the block. Feeding the target the block alone gives no such
    row, and the loop starts at the second token.
    """
    q = rows(d, q, p)
    chances = ratios(d, q, p)
    chances[:1] = 1
    n = int(randomness.first_failure(chances))
    return Verification(n, randomness.categorical(residual(p[n], q[n])), drafted=len(d))


def argmax_match(d, q, p, randomness: Randomness) -> Verification:
    """A draft token is accepted when it is the target's most likely one; otherwise that one takes its place.

    This is greedy decoding, whatever the temperature: right at temperature 0, and often claimed for sampling too.
    """
    best = p.argmax(-1)
    n = int(randomness.first_failure((d == best[: len(d)]).to(p.dtype)))
    return Verification(n, randomness.categorical(one_hot(best[n], like=p[n])), drafted=len(d))


def unsure_tokens_dropped(d, q, p, randomness: Randomness) -> Verification:
    """The draft is cut before the first token of which the draft was unsure (q below 0.4), after drawing it.

    To stop drafting early is fine as long as the token just drawn is still verified. Whether it is dropped depends on
    what it is, so dropping it makes the sure tokens more frequent. Made by draft-length heuristics.
    """
    q = rows(d, q, p)
    each = torch.arange(len(d), device=d.device)
    K = int((q[each, d] >= 0.4).int().cumprod(0).sum())
    kept = verify(d[:K], q[:K], p[: K + 1], randomness)
    return Verification(kept.accepted, kept.next_token, drafted=len(d))


def greedy_draft(q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The draft proposes its most likely token, and its softmax is reported as q.

    The token was not drawn from that q; a deterministic draft must report a point mass. It is made by a draft that runs
    ``argmax`` (or ``generate`` without sampling) beside a target that samples.
    """
    return one_hot(q.argmax(-1), like=q)


def colder_draft(q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The draft samples at half the temperature, and q is reported at the full one.

    It is made where temperature is applied by the sampling function, and the probabilities that the verification reads
    are computed from the logits once more, without it.
    """
    return q**2 / (q**2).sum(-1, keepdim=True)


def truncated_draft(q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The draft samples with top-p = 0.8, and q is reported before the truncation.

    Truncating the draft is harmless when the reported q is truncated too.
    """
    return keep_top_p(q, 0.8)


def unchanged(q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The draft draws from the q that it reports."""
    return q


@dataclass(frozen=True)
class WrongRule:
    """One slip. verify: the verification to run; proposes_from: what the draft really draws from, given its q."""

    name: str
    title: str
    verify: Verify = verify
    proposes_from: Callable[[Float[Tensor, " vocab"]], Float[Tensor, " vocab"]] = unchanged

    @property
    def why(self) -> str:
        """What the slip is, why it is one, and where people make it."""
        slip = self.verify if self.proposes_from is unchanged else self.proposes_from
        return inspect.getdoc(slip) or self.title

    def wrap(self, drafter):
        """``drafter`` with this slip in its proposals; it goes on reporting its own q. For the decoding loop."""
        return drafter if self.proposes_from is unchanged else Misdrafter(drafter, self.proposes_from)


class Misdrafter:
    """A drafter whose tokens are drawn from ``proposes_from(q)`` while q is what it reports."""

    def __init__(self, drafter, proposes_from):
        self._drafter = drafter
        self._proposes_from = proposes_from

    def propose(self, context, K, sampling, randomness: Randomness):
        return self._drafter.propose(context, K, sampling, Misdrawn(randomness, self._proposes_from))

    def __getattr__(self, name):  # all else is the drafter's own
        return getattr(self._drafter, name)


class Misdrawn:
    """Randomness that draws from ``proposes_from(q)`` where it is asked to draw from q."""

    def __init__(self, randomness: Randomness, proposes_from):
        self.first_failure = randomness.first_failure
        self.categorical = lambda q: randomness.categorical(proposes_from(q))


WRONG_RULES: dict[str, WrongRule] = {
    rule.name: rule
    for rule in (
        WrongRule("no_residual", "Resample from p after a rejection", no_residual),
        WrongRule("softmaxed_residual", "Softmax the residual", softmaxed_residual),
        WrongRule("partial_residual", "Subtract q at the rejected token only", partial_residual),
        WrongRule("recovered_from_draft", "Draw the recovered token from q", recovered_from_draft),
        WrongRule("shifted_residual", "Take the residual's p from the next position", shifted_residual),
        WrongRule("bonus_from_draft", "Draw the bonus token from q", bonus_from_draft),
        WrongRule("swapped_ratio", "Accept with min(1, q/p)", swapped_ratio),
        WrongRule("one_uniform", "Use one uniform number for all positions", one_uniform),
        WrongRule("first_unverified", "Keep the first draft token unverified", first_unverified),
        WrongRule("argmax_match", "Accept the target's argmax only", argmax_match),
        WrongRule("unsure_tokens_dropped", "Drop unsure draft tokens after seeing them", unsure_tokens_dropped),
        WrongRule("greedy_draft", "Draft the argmax, report the softmax", proposes_from=greedy_draft),
        WrongRule("colder_draft", "Draft at half the temperature that is reported", proposes_from=colder_draft),
        WrongRule("truncated_draft", "Draft with top-p, report q without", proposes_from=truncated_draft),
    )
}


def output_law(
    rule: WrongRule | Verify, p: Float[Tensor, "K+1 vocab"], q: Float[Tensor, "K vocab"], n: int | None = None
) -> dict[tuple[int, ...], float | Fraction]:
    """The exact law of the first n output tokens (all K + 1 by default) under ``rule``, by enumeration.

    rule: an entry of the gallery, or a verification function. p, q: row i is the distribution at position i, whatever
    the tokens before it. One round is run; tokens that it leaves open are drawn from the rows of p. So a lossless rule
    gives the product of the rows of p.
    """
    rule = rule if isinstance(rule, WrongRule) else WrongRule("", "", rule)
    p, q = (torch.as_tensor(table, dtype=torch.float64) for table in (p, q))
    n = len(p) if n is None else n

    def play(randomness: Randomness) -> tuple[int, ...]:
        draft = [int(randomness.categorical(rule.proposes_from(row))) for row in q]
        outcome = rule.verify(torch.tensor(draft, dtype=torch.long), q, p, randomness)
        tokens = [*draft[: int(outcome.accepted)], int(outcome.next_token)]
        tokens += [int(randomness.categorical(row)) for row in p[len(tokens) : n]]
        return tuple(tokens[:n])

    return enumerate_outcomes(play)


def first_token_law(
    rule: WrongRule | Verify, p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], K: int = 1
) -> Float[Tensor, " vocab"]:
    """The exact law of the first output token under ``rule`` when p and q are the same at every position."""
    p, q = (torch.as_tensor(row, dtype=torch.float64) for row in (p, q))
    law = output_law(rule, p.expand(K + 1, -1), q.expand(K, -1), n=1)
    return torch.tensor([law.get((token,), 0.0) for token in range(len(p))], dtype=torch.float64)
