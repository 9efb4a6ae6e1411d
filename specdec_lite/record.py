"""A run is data: what each round drafted and kept, how long its parts took, and the statistics that follow.

The decoding loop returns these records and prints nothing; colouring, figures, estimates and the benchmark read them.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from .theory import alpha_mle


@dataclass
class Round:
    """One draft-then-verify cycle: one forward pass of the target.

    draft_tokens: what was proposed. tokens: what was committed, cut at a stop. origins: for each of ``tokens``,
    "accepted", "recovered" or "bonus" (drawn from p itself, as every token is in plain decoding). text: what became
    complete with this round. Times in seconds; those of the first round include the prompt's prefill.
    """

    draft_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    draft_limited: bool = False  # fewer tokens were drafted than asked for: the draft's context is full
    finish_reason: str | None = None  # set on the last round
    text: str = ""
    parents: tuple[int, ...] | None = None  # of a token tree: the draft token that each one follows (-1: the text)

    @property
    def accepted(self) -> int:
        return self.origins.count("accepted")

    @property
    def rejected(self) -> bool:
        """The round ended in a rejection (and not at a stop before it)."""
        return "recovered" in self.origins

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.other_seconds


@dataclass
class Result:
    """What a run gave. finish_reason: "length", "stop" (an EOS id or a stop string) or "context" (the target is full).

    draft_stopped_at: how many tokens had been written when the draft's context was full and decoding went on with less
    drafting or none (``None``: that did not happen).
    """

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = "length"
    draft_stopped_at: int | None = None

    def add(self, round: Round) -> None:
        if round.draft_limited and self.draft_stopped_at is None:
            self.draft_stopped_at = len(self.tokens)
        self.rounds.append(round)
        self.tokens.extend(round.tokens)
        self.text += round.text
        self.finish_reason = round.finish_reason or self.finish_reason

    @property
    def origins(self) -> list[str]:
        """For each token of ``tokens``: "accepted", "recovered" or "bonus"."""
        return [origin for round in self.rounds for origin in round.origins]

    @property
    def seconds(self) -> float:
        return sum(round.seconds for round in self.rounds)

    @property
    def statistics(self) -> "Statistics":
        return Statistics.pooled([self])

    @property
    def alpha(self) -> float | None:
        """Maximum-likelihood chance that one draft token is accepted, given that those before it were.

        Of a tree: that one of the candidates for a position is.
        """
        return self.statistics.alpha

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted. It falls with K even when alpha does not: tokens after a rejection count as drafted."""
        return self.statistics.acceptance_rate

    @property
    def tokens_per_round(self) -> float | None:
        return self.statistics.tokens_per_round


@dataclass(frozen=True)
class Statistics:
    """Counts over one or more runs. Rates come from summed counts, never from a mean of rates."""

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    rejections: int

    @classmethod
    def pooled(cls, results: Sequence[Result]) -> "Statistics":
        rounds = [round for result in results for round in result.rounds]
        return cls(
            rounds=len(rounds),
            tokens=sum(len(round.tokens) for round in rounds),
            drafted=sum(len(round.draft_tokens) for round in rounds),
            accepted=sum(round.accepted for round in rounds),
            rejections=sum(round.rejected for round in rounds),
        )

    @classmethod
    def summed(cls, parts: Sequence["Statistics"]) -> "Statistics":
        return cls(*(sum(counts) for counts in zip(*map(astuple, parts), strict=True)))

    @property
    def alpha(self) -> float | None:
        return alpha_mle(self.accepted, self.rejections)

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None
