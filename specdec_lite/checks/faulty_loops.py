"""Loops with known faults, for the checks of notebook 03: the listing to be mended, and the suspects."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributions import residual
from ..randomness import Randomness, enumerate_outcomes
from ..verify import verify
from .core import dice, law
from .core import laws as random_laws

Text = tuple[int, ...]
Loop = Callable[[Randomness], Text]


FAULTS = {  # of a loop's law, and what the check says while one is still there
    "counted": "a token behind a rejected one still counts as accepted; everything behind the FIRST rejection goes",
    "leftover": "after a rejection it subtracts the law of the LAST drafted token, not of the rejected one",
    "bonus": "after a draft kept whole the next token is drawn from the draft's law; whose token is the bonus?",
    "rows": "the last rounds draft fewer than K tokens; the rows that judge them are then not the last K + 1",
}


def faulty_loop(faults: Sequence[str], target: Tensor, draft: Tensor, n: int, K: int, chance: Randomness) -> Text:
    """The listing with some of its faults, on tables. "long": it drafts K always, and cuts the text to n tokens."""
    text = [0]
    while (left := n + 1 - len(text)) > 0:
        q: list[Tensor] = []
        drafted: list[int] = []
        for _ in range(K if "long" in faults else min(K, left - 1)):
            q.append(draft[[*text, *drafted][-1]])
            drafted.append(int(chance.categorical(q[-1])))
        p = target[text + drafted][-(K if "rows" in faults else len(drafted)) - 1 :]
        ratios = torch.tensor([p[i, token] / q[i][token] for i, token in enumerate(drafted)], dtype=p.dtype)
        trials = ratios.split(1 if "counted" in faults else max(1, len(ratios)))
        kept = sum(int(chance.first_failure(each)) for each in trials)
        if kept < len(drafted):
            following = residual(p[kept], q[-1] if "leftover" in faults else q[kept])
        else:
            following = q[-1] if "bonus" in faults and drafted else p[kept]
        text += [*drafted[:kept], int(chance.categorical(following))]
    return tuple(text[1 : n + 1])


@lru_cache
def law_with(faults: tuple[str, ...], seed: int) -> dict[Text, Any]:
    """The exact law of three tokens, K = 2, of the loop with these faults."""
    target, draft = (random_laws(seed + n, 3, 3) for n in (31, 47))
    return enumerate_outcomes(partial(faulty_loop, faults, target, draft, 3, 2))


def suspects(variant: int = 0) -> tuple[list[list[Fraction]], dict[str, Loop]]:
    """(the target's table, loops under letters): each writes four tokens after token 0. Some are exact, some not."""
    chance = dice("03 suspects", variant)
    table = [law(chance, 2, 10) for _ in range(2)]
    while table[0] == table[1]:
        table[1] = law(chance, 2, 10)
    draft = np.array([[(a + 1) / 2, b / 2] for a, b in table])  # writes token 0 too often
    kinds = ["plain", "K changes", "no bonus", "bonus of the draft", "first row twice", "no residual"]
    loops: list[Loop] = [partial(four_tokens, np.array(table), draft, kind) for kind in kinds]
    chance.shuffle(loops)
    return table, dict(zip("ABCDEF", loops, strict=True))


def four_tokens(table: np.ndarray, draft: np.ndarray, kind: str, chance: Randomness) -> Text:
    """Four tokens after token 0, with K = 2. The first three kinds are exact."""
    text = [0]
    while len(text) < 5:
        drafted: list[int] = []
        for _ in range(min(sum(text) % 3 if kind == "K changes" else 2, 4 - len(text))):
            drafted.append(int(chance.categorical(draft[[*text, *drafted][-1]])))
        fed = [text[-1], *drafted]
        q, p = draft[fed[:-1]], table[fed]
        if kind == "first row twice":
            p[1:2] = p[0]
        outcome = verify(drafted, q if drafted else None, p, chance)  # type: ignore[arg-type]
        block = [*drafted[: outcome.accepted], int(outcome.next_token)]
        whole = bool(drafted) and outcome.origin == "bonus"
        if kind == "no residual" or (kind == "bonus of the draft" and whole):
            block[-1] = int(chance.categorical(p[outcome.accepted] if kind == "no residual" else q[-1]))
        text += block[:-1] if kind == "no bonus" and whole else block
    return tuple(text[1:])


def each_alone(table: np.ndarray, chance: Randomness) -> Text:
    """Four tokens. Each has the right law by itself; together they are right for one token only."""
    laws = [table[0] @ np.linalg.matrix_power(table, n) for n in range(4)]
    return tuple(int(chance.categorical(each)) for each in laws)
