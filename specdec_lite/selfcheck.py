"""Is it really lossless? One call on anybody's pair, and on any engine that claims to speed it up.

Greedy output must be the target's own, token for token (``examine.py``). Sampled output must have the target's own law:
that takes a test that can fail (``lawtest.py``). Its false-alarm rate and the smallest shift that it sees are stated,
and the gallery's wrong rules can be run through it, to see that each of them would have been caught.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from .bench import PROMPTS
from .distributions import Sampling
from .drafters.model import ModelDrafter
from .engines import EngineError, Loop, as_engine
from .examine import (
    Examined,
    Malformed,
    Progress,
    Row,
    Trial,
    drafting_row,
    greedy_row,
    seeds_row,
    stops_row,
    tokenizer_row,
)
from .gallery import WRONG_RULES
from .lawtest import FALSE_ALARM, POWER, LawTest, Rounding, check_law
from .pairs import Pair
from .text import encode_prompt
from .theory import check_K

LOSSLESS, NOT_LOSSLESS, COULD_NOT_TELL = 0, 1, 2  # exit codes
COARSEST = 0.2  # a law test that sees no smaller shift than this tells nothing
AT_ONCE = 64  # draws that are asked for in one call, of an engine with generate_many


@dataclass
class Report:
    """planted: a row per wrong rule; passed means that it was caught. error: what an engine raised.

    p_value, visible_shift: of all law tests together. exit_code: 0 lossless, 1 not, 2 could not tell.
    """

    pair: str
    engine: str
    K: int
    draws: int
    rows: list[Row] = field(default_factory=list)
    planted: list[Row] = field(default_factory=list)
    p_value: float | None = None
    visible_shift: float | None = None
    false_alarm: float = FALSE_ALARM
    error: str | None = None
    verdict: str = ""
    exit_code: int = COULD_NOT_TELL

    def conclude(self) -> None:
        failed = [f"{row.name}: {row.detail}" for row in self.rows if row.passed is False]
        unsettled = [f"{row.name}: {row.detail}" for row in self.rows if row.passed is None and not row.optional]
        unsettled = [self.error, *unsettled] if self.error else unsettled
        if failed:
            self.exit_code, self.verdict = NOT_LOSSLESS, f"not lossless: {failed[0]}"
        elif unsettled:
            self.exit_code, self.verdict = COULD_NOT_TELL, f"could not tell: {unsettled[0]}"
        else:
            self.exit_code = LOSSLESS
            self.verdict = "lossless: the target's own greedy tokens, and its law when sampling"


def check(
    pair: Pair,
    engine: Any = None,
    *,
    prompts: Sequence[str | Sequence[int]] = tuple(PROMPTS.values()),
    draws: int = 20_000,
    K: int = 2,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    planted: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Is ``engine`` lossless for the pair's target? Rows of what was checked, a verdict and an exit code.

    engine: ``None`` for this library's loop with the pair's draft; otherwise an ``Engine``, or a function
    ``(prompt, *, max_new_tokens, sampling, seed) -> new tokens``. The pair's draft may then be ``None``.
    prompts: what is continued, also in the law test. draws: runs of the law test, each of K + 1 tokens, so that
    recovered and bonus tokens are among them. K: tokens drafted per round (an engine of your own follows its own K).
    max_new_tokens: length of the greedy runs. sampling: of the law test; its temperature must be above 0.
    planted: also run the gallery's wrong rules with the pair's draft, and report which of them the law test catches.
    progress: is called with what is done, what there is to do, and its name.

    Raises ``ValueError`` for bad input, before any work, and ``FloatingPointError`` when the target's own logits hold a
    NaN. What the engine raises ends up in the report's ``error``; the rows so far are kept.
    """
    ids = check_input(pair, engine, prompts, draws, K, max_new_tokens, sampling, planted)
    trial = Trial(pair, ids, draws, K, max_new_tokens, sampling, seed, progress)
    subject = Examined(Loop(pair, K) if engine is None else as_engine(engine), ids, pair.target.vocab_size)
    report = Report(pair.name, subject.engine.name, K, draws)
    try:
        rounding = examine(trial, subject, report)
        if planted:
            report.planted.extend(plant(trial, rounding))
    except Malformed as fault:
        report.rows.append(Row("output", False, str(fault)))
    except EngineError as error:
        report.error = str(error)
    report.conclude()
    return report


def check_input(pair, engine, prompts, draws, K, max_new_tokens, sampling, planted) -> list[list[int]]:
    """The prompts as token ids. Raises ``ValueError``."""
    check_K(K)
    if K == 0:
        raise ValueError("K is 0: nothing would be drafted, so there would be nothing to check")
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts must be a list with at least one prompt")
    for name, number, least in (("draws", draws, 0), ("max_new_tokens", max_new_tokens, 1)):
        if not (isinstance(number, Integral) and int(number) >= least):
            raise ValueError(f"{name} is {number!r}; it must be a whole number, {least} or more")
    if sampling.temperature == 0:
        raise ValueError("temperature is 0, and the law test needs draws (greedy decoding is checked in any case)")
    if planted and draws == 0:
        raise ValueError("the planted rules are caught by the law test, and draws is 0")
    if pair.draft is None and (engine is None or planted):
        raise ValueError("this pair has no draft: give an engine, and leave out the planted rules")
    ids = [encode_prompt(pair.tokenizer, prompt, pair.target.vocab_size) for prompt in prompts]
    longest, new = max(map(len, ids)), max(max_new_tokens, 2 * K + 3)
    if longest + new > pair.target.context:
        raise ValueError(
            f"the longest prompt has {longest} tokens and {new} are to follow, but {pair.target.name} can hold "
            f"{pair.target.context}: shorten it, or lower max_new_tokens"
        )
    return ids


def examine(trial: Trial, subject: Examined, report: Report) -> Rounding:
    """Add the rows to the report one after the other, so that an error leaves those before it."""
    report.rows.append(tokenizer_row(trial.pair, subject.engine))
    trial.progress(0, len(trial.prompts), "greedy")
    row, rounding = greedy_row(trial, subject)
    report.rows.append(row)
    report.rows.append(seeds_row(trial, subject))
    report.rows.append(stops_row(trial, subject))
    subject.drafted = subject.accepted = 0
    test = law_of(trial, subject, trial.draws, rounding)
    if test.tests:
        report.p_value, report.visible_shift = test.p_value, test.visible_shift
    report.rows.extend(law_rows(test, trial, rounding))
    if trial.draws:
        report.rows.append(drafting_row(subject))
    report.rows.append(Row("output", True, "in every run as many tokens as were asked for, all of the vocabulary"))
    return rounding


def plant(trial: Trial, rounding: Rounding) -> Iterator[Row]:
    """Each wrong rule of the gallery in place of the right one: same loop, same test."""
    pair = trial.pair
    for rule in WRONG_RULES.values():
        drafter = rule.wrap(ModelDrafter(pair.draft, pair.target.vocab_size))
        engine = Loop(pair, trial.K, drafter=drafter, verify=rule.verify, name=rule.name)
        subject = Examined(engine, trial.prompts, pair.target.vocab_size)
        for draws in (trial.draws // 10, trial.draws):  # a tenth is often enough
            p_value = law_of(trial, subject, draws, rounding).p_value
            if caught := p_value < FALSE_ALARM:
                break
        seen = "caught" if caught else "not visible on this pair"
        yield Row(rule.name, caught or None, f"{rule.title}: {seen}, p = {p_value:.1e} with {draws:,} draws", p_value)


def law_of(trial: Trial, subject: Examined, draws: int, rounding: Rounding) -> LawTest:
    """Run i continues prompt i (modulo their number) with seed ``trial.seed + i``, for K + 1 tokens."""
    n, prompts = trial.K + 1, trial.prompts
    rows: list[list[int]] = []
    while len(rows) < draws:
        trial.progress(len(rows), draws, f"draws of {subject.engine.name}")
        runs = range(len(rows), min(len(rows) + AT_ONCE, draws))
        seeds = [trial.seed + i for i in runs]
        rows += subject.ask([i % len(prompts) for i in runs], seeds, n, trial.sampling)
    tokens = torch.tensor(rows, dtype=torch.long).view(draws, n)
    return check_law(trial.pair, prompts, tokens, trial.sampling, rounding=rounding, seed=trial.seed)


def law_rows(test: LawTest, trial: Trial, rounding: Rounding) -> Iterator[Row]:
    for position in sorted({each.position for each in test.tests}):
        here = [each for each in test.tests if each.position == position]
        numbers = [f"by {t.order}: chi2 = {t.statistic:.1f} on {t.df}, p = {t.p_value:.2g}" for t in here]
        p_value = min(each.p_value for each in here)
        yield Row(f"law of token {position}", p_value >= test.level, "; ".join(numbers), p_value)
    if test.impossible:
        yield Row("law", False, test.impossible, 0.0)
    elif test.visible_shift > COARSEST and test.p_value >= FALSE_ALARM:
        seen = f"nothing below a shift of {test.visible_shift:.0%}" if test.tests else "nothing"
        yield Row("law", None, f"{trial.draws} draws at {len(trial.prompts)} prompts are too few: {seen} would be seen")
    else:
        detail = (
            f"p = {test.p_value:.2g}, {len(test.tests)} tests together, {trial.draws:,} draws; a lossless engine fails "
            f"once in {1 / FALSE_ALARM:,.0f} times, a shift of {test.visible_shift:.1%} is seen with {POWER:.0%}"
        )
        if (allowed := trial.draws * rounding.law) > 0.01:
            detail += f"; rounding may add {allowed:.2f} to each chi2, which is allowed for"
        yield Row("law", test.p_value >= FALSE_ALARM, detail, test.p_value)


def table(report: Report) -> str:
    """The report as text, a line for each row and the verdict last."""

    def lines(rows: list[Row], states: dict[bool | None, str]) -> list[str]:
        return [f"{states[row.passed]:<5} {row.name:<22} {row.detail}" for row in rows]

    parts = [f"{report.pair}: {report.engine}", *lines(report.rows, {True: "PASS", False: "FAIL", None: "--"})]
    if report.planted:
        parts += ["", "wrong rules in this library's loop, under the same test:"]
        parts += lines(report.planted, {True: "seen", None: "--"})
    return "\n".join([*parts, "", report.verdict])
