"""Plant the known wrong answers into the solutions, and list the message that each one gets: docs/wrong-answers.md.

    python tools/wrong_answers.py

solutions/wrong_answers/*.toml is the source. The messages are those that the checks really gave.
"""

import contextlib
import functools
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # so that it runs as a script too
    sys.path.insert(0, str(ROOT))

from tools.exercises import SOLUTIONS, with_variant  # noqa: E402
from tools.links import tomllib  # noqa: E402

PAGE = "docs/wrong-answers.md"
INTRODUCTION = """\
<!-- tools/wrong_answers.py writes this from solutions/wrong_answers/ -->

# Common wrong answers, and the message each gets

For instructors. Learners meet these messages one at a time, when they have earned them. Each row was planted into the
solution, and the message is what the check said. The code of each wrong answer is in `solutions/wrong_answers/`.
"""


@dataclass(frozen=True)
class Wrong:
    """A wrong answer to a task. slip: what is wrong, in plain words. says: a part of the message it must get."""

    task: str
    slip: str
    says: str
    code: str


def wrong_answers(name: str) -> list[Wrong]:
    """Those to the notebook ``name``, in the order of its file; none if there is no file."""
    path = SOLUTIONS / "wrong_answers" / f"{name}.toml"
    if not path.exists():
        return []
    return [Wrong(**each) for each in tomllib.loads(path.read_text(encoding="utf-8"))["wrong"]]


def grade_id(cell: nbformat.NotebookNode) -> str:
    """The name that nbgrader knows a cell by, or ""."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def run(source: str, names: dict, label: str) -> None:
    """Execute a cell in ``names``, quietly."""
    code = compile(TransformerManager().transform_cell(source), f"<{label}>", "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)


@dataclass(frozen=True)
class Played:
    """A solution that was run."""

    checks: dict[str, str]  # task -> the source of its check
    before: dict[str, dict]  # task -> the names that existed before its check
    names: dict  # those that existed in the end


@functools.cache
def play(name: str, variant: int = 0) -> Played:
    """Run a solution from top to bottom. Raises what its first failing cell raises."""
    notebook = with_variant(nbformat.read(SOLUTIONS / f"{name}.ipynb", as_version=4), variant)
    played = Played({}, {}, {"__name__": "__main__"})
    for cell in notebook.cells:
        if grade_id(cell).startswith("check_"):
            task = grade_id(cell).removeprefix("check_")
            played.checks[task], played.before[task] = cell.source, dict(played.names)
        if cell.cell_type == "code":
            run(cell.source, played.names, grade_id(cell) or cell.id)
    return played


@functools.cache
def message(name: str, wrong: Wrong) -> str:
    """What the check says of a wrong answer to the notebook ``name``, "" if it passes."""
    names = dict(play(name).before[wrong.task])
    run(wrong.code, names, wrong.task)
    try:
        run(play(name).checks[wrong.task], names, f"check_{wrong.task}")
    except AssertionError as error:
        return str(error)
    return ""


def page() -> str:
    """The text of docs/wrong-answers.md."""
    blocks = [INTRODUCTION]
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        title = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        rows = ["| task | wrong answer | message |", "|---|---|---|"]
        for wrong in wrong_answers(path.stem):
            said, slip = (text.replace("|", "&#124;") for text in (message(path.stem, wrong), wrong.slip))
            rows.append(f"| `{wrong.task}` | {slip} | {' '.join(said.split())} |")
        blocks.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8", newline="\n")
