"""Write the quiz: docs/quiz.md and notebooks/14_self_test.ipynb, both from docs/quiz.toml.

    python tools/quiz.py

Every option is a fold: a click shows whether it is right, and why. That works on GitHub, in JupyterLab and in Colab,
without a kernel and without a network. Numbers are calculated by the library (see docs/quiz.toml), and the notebook
shows the calculation. Code that did not change keeps its output; if some did, run
`python tools/notebooks.py notebooks/14_self_test.ipynb` as well.
"""

import html
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # so that it runs as a script too
    sys.path.insert(0, str(ROOT))

from tools import links  # noqa: E402
from tools.notebooks import METADATA  # noqa: E402

SOURCE, PAGE, NOTEBOOK = "docs/quiz.toml", "docs/quiz.md", "notebooks/14_self_test.ipynb"


@dataclass(frozen=True)
class Question:
    """options: what to click, and its explanation. numbers: name -> (calculation, its result as text)."""

    number: int
    notebook: str
    section: str
    text: str
    options: list[tuple[str, str]]
    right: int
    numbers: dict[str, tuple[str, str]]

    def fill(self, text: str) -> str:
        """``text`` with each {name} replaced by its number."""
        for name, (_, value) in self.numbers.items():
            text = text.replace(f"{{{name}}}", value)
        return text


@dataclass(frozen=True)
class Part:
    notebook: str
    title: str
    questions: list[Question]


@dataclass(frozen=True)
class Quiz:
    raw: dict  # docs/quiz.toml as it is
    parts: list[Part]

    @property
    def questions(self) -> list[Question]:
        return [question for part in self.parts for question in part.questions]


def read(text: str) -> Quiz:
    """The quiz in docs/quiz.toml, its numbers calculated. ``ValueError`` when an answer is none of its options."""
    raw = links.tomllib.loads(text)
    names: dict = {}
    for cell in raw["prelude"]:
        exec(cell, names)
    parts, number = [], 0
    for part in raw["part"]:
        questions = []
        for each in part["question"]:
            number += 1
            letters = "ABCD"[: len(each["options"])]
            if each["answer"] not in letters:
                raise ValueError(f"question {number}: the answer is {each['answer']!r}, and the options are {letters}")
            numbers = {name: (body, eval(f'f"{body}"', names)) for name, body in each.get("numbers", {}).items()}
            options = [(text, why) for text, why in each["options"]]
            right = letters.index(each["answer"])
            questions.append(Question(number, part["notebook"], each["section"], each["text"], options, right, numbers))
        parts.append(Part(part["notebook"], part["title"], questions))
    return Quiz(raw, parts)


def inline(text: str) -> str:
    """What to click is HTML, where Markdown does not work: only code in backticks is kept."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def fold(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def link(number: str, folder: str) -> str:
    """``notebook 06``, as a link if there is one."""
    found = [path.name for path in ROOT.glob(f"notebooks/{number}_*.ipynb")]
    return f"[notebook {number}]({folder}{found[0]})" if found else f"notebook {number}"


def question_text(question: Question, folder: str) -> str:
    lines = [f"**{question.number}.** {question.fill(question.text)}"]
    for i, (text, why) in enumerate(question.options):
        verdict = "Right." if i == question.right else "No."
        lines.append(fold(f"{'ABCD'[i]}. {inline(question.fill(text))}", f"**{verdict}** {question.fill(why)}"))
    section = f": {question.section}" if question.section else ""
    lines.append(f"Taught in {link(question.notebook, folder)}{section}")
    return "\n\n".join(lines)


def open_text(number: int, question: dict, folder: str) -> str:
    points = "\n".join(f"- {point}" for point in question["points"])
    taught = ", ".join(link(notebook, folder) for notebook in question["taught"])
    folds = fold("An answer", question["answer"].strip()), fold("What a good answer has", points)
    return "\n\n".join([f"**{number}.** {question['text']}", *folds, f"Taught in {taught}"])


def part_title(part: Part) -> str:
    return f"## {part.notebook}. {part.title}"


def scores(quiz: Quiz) -> str:
    """A table to fill in: how many of each part were right at the first click."""
    rows = [f"| {part.notebook} {part.title} | | {len(part.questions)} |" for part in quiz.parts]
    return "\n".join(["| part | right at the first click | of |", "|---|---|---|", *rows])


def page(quiz: Quiz) -> str:
    """The text of docs/quiz.md."""
    folder, raw = "../notebooks/", quiz.raw
    blocks = [f"<!-- tools/quiz.py writes this from {SOURCE} -->", "# Test yourself", raw["how"].strip()]
    for part in quiz.parts:
        blocks += [part_title(part), *(question_text(question, folder) for question in part.questions)]
    blocks += ["## Open questions", raw["how_open"].strip()]
    blocks += [open_text(number, question, folder) for number, question in enumerate(raw["open"], start=1)]
    blocks += ["## Your score", raw["how_score"].strip(), scores(quiz)]
    return "\n\n".join(blocks) + "\n"


def calculations(part: Part) -> str:
    """Code that prints the numbers of a part."""
    return "\n".join(
        f'print("question {question.number}, {name}:", f"{body}")'
        for question in part.questions
        for name, (body, _) in question.numbers.items()
    )


def cells(quiz: Quiz) -> list[nbformat.NotebookNode]:
    """The notebook's cells, without outputs."""
    raw, made = quiz.raw, []

    def add(new: Callable[..., nbformat.NotebookNode], name: str, *blocks: str, **metadata: list[str]) -> None:
        made.append(new("\n\n".join(blocks), id=f"14-{name}", metadata=metadata))

    markdown, code = partial(add, new_markdown_cell), partial(add, new_code_cell)
    needs = raw["needs"].format(count=len(quiz.questions), count_open=len(raw["open"]))
    markdown("title", "# Test yourself", needs.strip())
    markdown("badges", "badges", tags=["badges"])
    code("setup", "setup", tags=["setup"])
    markdown("how", "## How it works", raw["how"].strip(), raw["how_numbers"].strip())
    for i, cell in enumerate(raw["prelude"]):
        code(f"prelude-{i}", cell.strip())
    for part in quiz.parts:
        markdown(f"part-{part.notebook}", part_title(part))
        for question in part.questions:
            markdown(f"question-{question.number}", question_text(question, ""))
        if calculation := calculations(part):
            markdown(f"before-{part.notebook}", "*The numbers of this part, calculated. Answer first.*")
            code(f"numbers-{part.notebook}", calculation)
    markdown("open", "## Open questions", raw["how_open"].strip())
    for number, question in enumerate(raw["open"], start=1):
        markdown(f"open-{number}", open_text(number, question, ""))
    markdown("score", "## Summary: your score", raw["how_score"].strip(), scores(quiz))
    markdown("next", "## What next", raw["next"].strip())
    return made


def notebook(quiz: Quiz, stored: nbformat.NotebookNode | None = None) -> str:
    """The notebook as text; code that stands in ``stored`` too keeps the output that it has there."""
    made = new_notebook(cells=cells(quiz), metadata=METADATA, nbformat_minor=5)
    text = links.notebook(nbformat.writes(made), links.Project.read(ROOT), NOTEBOOK)
    content = json.loads(text)
    old = {(cell.id, cell.source): cell for cell in stored.cells if cell.cell_type == "code"} if stored else {}
    for cell in content["cells"]:
        if kept := old.get((cell["id"], "".join(cell["source"]))):
            cell["outputs"], cell["execution_count"] = kept.outputs, kept.execution_count
    return nbformat.writes(nbformat.from_dict(content)) + "\n"


def main() -> None:
    quiz = read((ROOT / SOURCE).read_text(encoding="utf-8"))
    stored = nbformat.read(ROOT / NOTEBOOK, as_version=4) if (ROOT / NOTEBOOK).exists() else None
    for path, text in ((PAGE, page(quiz)), (NOTEBOOK, notebook(quiz, stored))):
        (ROOT / path).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
