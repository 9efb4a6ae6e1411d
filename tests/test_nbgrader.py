"""nbgrader, for real: a class of seven hands in exercises 02, and the grade book holds what each of them earned."""

import copy
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

from tools import exercises
from tools.wrong_answers import grade_id

ASSIGNMENT = "02_two_token_exactness"
VARIANT = 2027
CELL_TIMEOUT = 25  # seconds, for the endless loop; a class has the 120 of the config
EXPLAINED = "explain_rejection"  # 3 points, read by a person
AUTOMATIC = 19  # points of all checks


def cell_of(notebook, name):
    return next(cell for cell in notebook.cells if grade_id(cell) == name)


def answer(notebook, name, source):
    cell_of(notebook, name).source = source


def perfect(notebook, solved):
    for cell in solved.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            answer(notebook, grade_id(cell), cell.source)


def empty(notebook, solved):
    pass


def partly_wrong(notebook, solved):
    perfect(notebook, solved)
    answer(notebook, "accepts", "def accepts(u, p_x, q_x):\n    return p_x > 0 and u < q_x / p_x")
    answer(notebook, EXPLAINED, exercises.learner_copy(solved).cells[-2].source)


def tampered(notebook, solved):
    check = cell_of(notebook, "check_residual")
    check.source = "print('residual: right')"
    check.metadata.nbgrader.points = 100
    cell_of(notebook, "given").source = "VARIANT = 0"


def endless(notebook, solved):
    perfect(notebook, solved)
    cell_of(notebook, "acceptance").source += "\n\ndef acceptance(p, q):\n    while True:\n        pass"


def doubled(notebook, solved):
    perfect(notebook, solved)
    for name in ("check_by_hand", "residual"):
        twin = copy.deepcopy(cell_of(notebook, name))
        twin.id = f"twin-{name}".replace("_", "-")
        notebook.cells.insert(notebook.cells.index(cell_of(notebook, name)), twin)


def cut_short(notebook, solved):
    perfect(notebook, solved)
    notebook.cells.remove(cell_of(notebook, "check_biases"))
    cell_of(notebook, "check_accepts").metadata.nbgrader.grade_id = "my_own_check"


STUDENTS: dict[str, tuple[Callable, int]] = {  # what they did, and the points of the checks
    "ada": (perfect, AUTOMATIC),
    "bo": (empty, 0),
    "cleo": (partly_wrong, AUTOMATIC - 2),
    "dan": (tampered, 0),
    "eve": (endless, AUTOMATIC - 2),
    "fay": (doubled, AUTOMATIC),
    "gil": (cut_short, AUTOMATIC - 4 - 2),
}


def nbgrader(course, *command):
    """Run nbgrader in the course folder; its log if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it calls alembic by name
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *command], cwd=course, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def exported(course):
    """student -> their row of the exported grades."""
    nbgrader(course, "export")
    with (course / "grades.csv").open(encoding="utf-8") as file:
        return {row["student_id"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder after the whole round: assigned, handed in, graded by machine, with feedback."""
    folder = tmp_path_factory.mktemp("course")
    exercises.write_course(VARIANT, folder)
    ours = shutil.copytree(folder / "release", folder / "our_release")
    nbgrader(folder, "generate_assignment", ASSIGNMENT)
    solved = nbformat.read(folder / "source" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", 4)
    for student, (did, _) in STUDENTS.items():
        notebook = nbformat.read(ours / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", 4)
        did(notebook, solved)
        handed_in = folder / "submitted" / student / ASSIGNMENT / f"{ASSIGNMENT}.ipynb"
        handed_in.parent.mkdir(parents=True)
        nbformat.write(notebook, handed_in)
    nbgrader(folder, "autograde", ASSIGNMENT, f"--Execute.timeout={CELL_TIMEOUT}")
    nbgrader(folder, "generate_feedback", ASSIGNMENT)
    return folder


def test_what_nbgrader_generates_is_what_we_generate(course):
    theirs = nbformat.read(course / "release" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", 4)
    ours = nbformat.read(course / "our_release" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", 4)
    assert theirs == ours


def test_the_grade_book_holds_what_each_student_earned(course):
    grades = exported(course)
    assert {name: float(row["raw_score"]) for name, row in grades.items()} == {
        name: points for name, (_, points) in STUDENTS.items()
    }
    assert {float(row["max_score"]) for row in grades.values()} == {AUTOMATIC + 3}


def test_an_explanation_waits_for_a_reader_unless_it_is_empty(course):
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        waiting = {name: book.find_submission(ASSIGNMENT, name).needs_manual_grade for name in STUDENTS}
        assert waiting == {"ada": True, "bo": False, "cleo": False, "dan": False, "eve": True, "fay": True, "gil": True}
        book.find_grade(EXPLAINED, ASSIGNMENT, ASSIGNMENT, "ada").manual_score = 2
        book.db.commit()
    assert float(exported(course)["ada"]["raw_score"]) == AUTOMATIC + 2


def feedback(course, student):
    return (course / "feedback" / student / ASSIGNMENT / f"{ASSIGNMENT}.html").read_text(encoding="utf-8")


def test_feedback_shows_the_message_that_names_the_slip(course):
    assert "upside down" in feedback(course, "cleo")
    assert "not attempted yet" in feedback(course, "bo")


def test_a_changed_check_is_put_back_before_it_is_run(course):
    graded = nbformat.read(course / "autograded" / "dan" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", 4)
    assert "check_residual(residual, seed=1)" in cell_of(graded, "check_residual").source
    assert cell_of(graded, "check_residual").metadata.nbgrader.points == 3
    assert f"VARIANT = {VARIANT}" in cell_of(graded, "given").source
