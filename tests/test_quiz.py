"""The quiz: one source for the page and the notebook, fair questions, explained options, calculated numbers."""

import copy
import json
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from tools import quiz

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / quiz.SOURCE).read_text(encoding="utf-8")
QUIZ = quiz.read(SOURCE)
NUMBERS_OF_NOTEBOOKS = {f"{number:02}" for number in range(1, 14)}

# The common errors about speculative decoding: for each a wrong option, by a part of its text and of its explanation.
COMMON_ERRORS = {
    "accepted is alpha times K": ("{naive}", "alpha times K"),
    "never slower": ("Nothing is wrong: one pass gives one token", "passes of the target only"),
    "identical means the same tokens": ("The same seed gives the same text", "only greedy decoding"),
    "greedy texts are equal in half precision too": ("The verification is wrong: greedy", "half precision"),
    "resample from p": ("From p, since that is the law", "come twice"),
    "softmax the residual": ("From the softmax of p - q", "cut at 0"),
    "the bonus from the residual": ("From the residual at the last draft token", "nothing is owed"),
    "any reported q will do": ("the rule corrects any draft", "what it drew from"),
    "truncating p is a bias": ("The output is biased towards the eight", "exactly this law"),
    "one penalty for a round": ("Work it out once per round", "as if the first had not been written"),
    "matching the target's own draw is a bias": ("Biased; it accepts {match}", "the target's own draw"),
    "a small KL is a high alpha": ("Yes: alpha is 1 - KL", "1 - TV"),
    "no synchronisation": ("A pass, if the model was warmed up", "before the GPU has done its work"),
    "a slow baseline": ("{boast}", "two *programs*"),
    "noise is a bias": ("18% of the probability", "perfect sampler"),
    "a test that cannot fail": ("The engine passes", "nothing can fail"),
    "p and q swapped": ("1, since 0.8 is more than 0.3", "changed places"),
    "late tokens are worse": ("The draft drifts away", "no drift to see"),
    "the highest acceptance is the fastest": ("L: its tokens are accepted", "two and a half times as long"),
    "a dropped token does no harm": ("the target writes in place of the dropped token", "not from what is owed"),
}


def without_outputs(text):
    content = json.loads(text)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return content


def test_the_page_is_what_the_source_gives():
    assert (ROOT / quiz.PAGE).read_text(encoding="utf-8") == quiz.page(QUIZ), "run `python tools/quiz.py`"


def test_the_notebook_is_what_the_source_gives():
    stored = (ROOT / quiz.NOTEBOOK).read_text(encoding="utf-8")
    assert without_outputs(stored) == without_outputs(quiz.notebook(QUIZ)), "run `python tools/quiz.py`"


def test_writing_it_again_changes_nothing_and_keeps_the_outputs():
    stored = (ROOT / quiz.NOTEBOOK).read_text(encoding="utf-8")
    assert quiz.notebook(QUIZ, nbformat.reads(stored, as_version=4)) == stored


def test_the_output_of_changed_code_is_dropped():
    stored = nbformat.read(ROOT / quiz.NOTEBOOK, as_version=4)
    changed = next(cell for cell in stored.cells if cell.id == "14-numbers-06")
    changed.source += "  "
    again = nbformat.reads(quiz.notebook(QUIZ, stored), as_version=4)
    emptied = [cell.id for cell in again.cells if cell.cell_type == "code" and cell.execution_count is None]
    assert emptied == ["14-numbers-06"]


def broken_rules(question):
    """What is wrong with a question, a sentence each."""
    texts, whys = zip(*question.options, strict=True)
    filled = [question.fill(text) for text in texts]
    if not 3 <= len(texts) <= 4:
        yield f"{len(texts)} options; 3 or 4 are asked for"
    if len(set(filled)) < len(filled):
        yield f"two options say the same: {filled}"
    if any(len(why) < 20 for why in whys) or len(set(whys)) < len(whys):
        yield "an option is not explained"
    used = " ".join([question.text, *texts, *whys])
    if any(re.search(r"[*$]", text) for text in filled):
        yield f"what is clicked is HTML, and an option has Markdown: {filled}"
    if unknown := re.findall(r"\{\w+\}", question.fill(used)):
        yield f"numbers that nobody calculates: {unknown}"
    typed = re.fullmatch(r"[\d.]+( ms)?", texts[question.right])
    if typed and typed[0] not in question.text:  # to point at one of the question's own numbers is no calculation
        yield f"the right number is typed: {typed[0]}"
    if idle := [name for name in question.numbers if f"{{{name}}}" not in used]:
        yield f"calculated and not used: {idle}"


@pytest.mark.parametrize("question", QUIZ.questions, ids=lambda question: str(question.number))
def test_a_question_keeps_the_rules(question):
    assert not list(broken_rules(question))


FAULTS = {
    "2 options": lambda options: options[:2],
    "say the same": lambda options: [options[0], (options[0][0], "Another explanation of the same thing."), options[2]],
    "not explained": lambda options: [*options[:2], (options[2][0], "")],
    "nobody calculates": lambda options: [*options[:2], ("{unknown}", options[2][1])],
    "is typed": lambda options: [options[0], ("2.36", "It is typed, and might be any number."), options[2]],
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_in_a_question_is_found_and_named(message):
    question = next(each for each in QUIZ.questions if "naive" in each.numbers and "E" in each.numbers)
    changed = copy.copy(question)
    object.__setattr__(changed, "options", FAULTS[message](question.options))
    assert any(message in fault for fault in broken_rules(changed))


def test_an_answer_that_is_no_option_is_refused():
    with pytest.raises(ValueError, match="question 1: the answer is 'E'"):
        quiz.read(SOURCE.replace('answer = "C"', 'answer = "E"', 1))


def test_there_are_enough_questions_on_every_notebook():
    assert len(QUIZ.questions) >= 44
    assert {part.notebook for part in QUIZ.parts} == NUMBERS_OF_NOTEBOOKS
    assert all(len(part.questions) >= 3 for part in QUIZ.parts)


def test_neither_place_nor_length_gives_the_answer_away():
    places = Counter("ABCD"[question.right] for question in QUIZ.questions)
    possible = Counter(letter for question in QUIZ.questions for letter in "ABCD"[: len(question.options)])
    shares = {letter: places[letter] / possible[letter] for letter in possible}
    assert all(0.2 < share < 0.45 for share in shares.values()), shares
    longest = 0
    for question in QUIZ.questions:
        lengths = [len(question.fill(text)) for text, _ in question.options]
        longest += lengths.count(max(lengths)) == 1 and lengths[question.right] == max(lengths)
    assert longest / len(QUIZ.questions) < 0.35


def test_the_section_that_teaches_a_question_exists():
    for question in QUIZ.questions:
        for path in ROOT.glob(f"notebooks/{question.notebook}_*.ipynb"):
            cells = nbformat.read(path, as_version=4).cells
            text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
            headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
            assert not question.section or question.section in headings, f"question {question.number}: {headings}"


@pytest.mark.parametrize("error", COMMON_ERRORS)
def test_a_common_error_is_an_option_and_is_explained(error):
    said, explained = COMMON_ERRORS[error]
    assert any(
        said.lower() in text.lower() and explained.lower() in why.lower()
        for question in QUIZ.questions
        for i, (text, why) in enumerate(question.options)
        if i != question.right
    )


def test_a_click_shows_the_verdict_and_one_option_is_right():
    text = quiz.page(QUIZ)
    assert text.count("**Right.**") == len(QUIZ.questions)
    assert text.count("**No.**") == sum(len(question.options) - 1 for question in QUIZ.questions)
    assert text.count("<details>") == text.count("</details>")
    assert "<code>[:-0]</code>" not in text  # a heading is Markdown: only what is clicked is HTML
    assert quiz.inline("S < 1/c, see `a<b`") == "S &lt; 1/c, see <code>a&lt;b</code>"


def test_an_open_question_has_an_answer_and_points():
    for question in QUIZ.raw["open"]:
        assert len(question["answer"]) > 300 and len(question["points"]) >= 4 and question["taught"]
