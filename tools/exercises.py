"""Make the exercises from their solutions, or a course folder for a class.

    python tools/exercises.py                   solutions/*.ipynb -> exercises/*.ipynb
    python tools/exercises.py --variant 2027    build/course-2027/, ready for nbgrader, with other numbers

The solutions are the one source. nbgrader's own steps take out the answers, the hidden tests and the outputs, so what
comes out is what `nbgrader generate_assignment` would make. A variant changes one line of a notebook: its numbers,
seeds and prompts come from `VARIANT`, and so do those that its checks expect.
"""

import argparse
import copy
import shutil
import sys
from pathlib import Path

import nbformat
from nbgrader import preprocessors

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # so that it runs as a script too
    sys.path.insert(0, str(ROOT))

from tools.variants import with_number  # noqa: E402

SOLUTIONS, EXERCISES = ROOT / "solutions", ROOT / "exercises"
CONFIG = SOLUTIONS / "nbgrader_config.py"
# Those of generate_assignment, less the one that writes the grade book.
STEPS = [
    preprocessors.LockCells,
    preprocessors.ClearSolutions,
    preprocessors.ClearOutput,
    preprocessors.CheckCellMetadata,
    preprocessors.ComputeChecksums,
    preprocessors.ClearHiddenTests,
    preprocessors.ClearMarkScheme,
    preprocessors.ComputeChecksums,
    preprocessors.CheckCellMetadata,
]


def with_variant(notebook: nbformat.NotebookNode, variant: int) -> nbformat.NotebookNode:
    """A copy with other numbers, and without outputs, which were those of the old ones."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = with_number(cell.source, variant)
            cell.outputs, cell.execution_count = [], None
    return notebook


def learner_copy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What a learner gets: the notebook without answers, hidden tests and outputs."""
    notebook = copy.deepcopy(notebook)
    for step in STEPS:
        notebook, _ = step().preprocess(notebook, {})
    return notebook


def text(notebook: nbformat.NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def write_exercises(folder: Path = EXERCISES) -> None:
    """Write every exercise notebook anew, and remove those whose solution is gone."""
    folder.mkdir(exist_ok=True)
    made = {
        path.name: text(learner_copy(nbformat.read(path, as_version=4))) for path in sorted(SOLUTIONS.glob("*.ipynb"))
    }
    for path in folder.glob("*.ipynb"):
        if path.name not in made:
            path.unlink()
    for name, content in made.items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")


def write_course(variant: int, folder: Path) -> None:
    """A folder that nbgrader can run in: source/ for the instructor, release/ for the class."""
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        solved = with_variant(nbformat.read(path, as_version=4), variant)
        for step, notebook in {"source": solved, "release": learner_copy(solved)}.items():
            target = folder / step / path.stem / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text(notebook), encoding="utf-8", newline="\n")
    shutil.copy(CONFIG, folder / CONFIG.name)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", type=int, help="numbers for a class: a year will do; 0 has the published ones")
    variant = parser.parse_args(arguments).variant
    if variant is None:
        write_exercises()
    elif variant < 0:
        parser.error(f"--variant is {variant}; it must be 0 or more")
    else:
        folder = ROOT / "build" / f"course-{variant}"
        write_course(variant, folder)
        print(f"{folder.relative_to(ROOT)}: source/ is yours, release/ is for the class; docs/instructors.md goes on")


if __name__ == "__main__":
    main(sys.argv[1:])
