"""Drafters with known faults around one good layer, for the checks of notebook 12: the suspects."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..decoding import decode
from ..distributions import Sampling
from ..drafters import Draft
from ..randomness import Randomness
from ..table import TableModel
from .core import dice, laws

Path = tuple[int, ...]
Play = Callable[[Randomness], tuple[Path, int]]  # a text, and the rounds that it took


class Suspect:
    """A drafter for a target of three tokens, with a layer that guesses well; ``fault`` is what is wrong with it."""

    name, limit = "suspect", lambda self, length: self.target.context
    start = commit = lambda *_: None  # it keeps nothing

    def __init__(self, target: TableModel, fault: str):
        self.target, self.fault = target, fault
        self.after = (0.8 * target.log_table[0]).softmax(-1)

    def law(self, text: Path) -> Float[Tensor, " 3"]:
        """What the layer says after a text; blind: when it is not told the last token."""
        return self.after[text[-2]] @ self.after if self.fault == "blind" else self.after[text[-1]]

    def propose(self, context: Int[Tensor, " n"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        text, reported = tuple(context.tolist()), []
        for _ in range(K):
            q = self.law(text)
            drawn = q**2 / (q**2).sum() if self.fault == "sharper" else q
            text = (*text, int(q.argmax() if self.fault == "chosen" else randomness.categorical(drawn)))
            reported.append(self.law(text) if self.fault == "late" else q)
        return Draft(torch.tensor(text[-K:]), torch.stack(reported))


def suspects(variant: int = 0) -> tuple[Play, dict[str, Play]]:
    """Plain decoding, and five drafters under letters: three tokens behind the prompt (0, 1), with K = 2."""
    chance = dice("12 suspects", variant)
    table = laws(chance.randrange(10**6), 3, 3) ** 1.5
    target = TableModel(table / table.sum(-1, keepdim=True))

    def playing(drafter: Suspect | None) -> Play:
        def play(chance: Randomness) -> tuple[Path, int]:
            rounds = [*decode(target, drafter, [0, 1], max_new_tokens=3, K=2, sampling=Sampling(), randomness=chance)]
            return tuple(token for each in rounds for token in each.tokens), len(rounds)

        return play

    faults = chance.sample(["none", "blind", "chosen", "sharper", "late"], 5)
    return playing(None), {name: playing(Suspect(target, fault)) for name, fault in zip("ABCDE", faults, strict=True)}
