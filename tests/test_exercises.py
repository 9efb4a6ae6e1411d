"""The exercises: made from the solutions, leaking nothing, and checked by checks that name the slip."""

import re
from collections import Counter

import nbformat
import pytest

from specdec_lite.checks.core import NotAttempted
from tools import exercises, wrong_answers
from tools.wrong_answers import grade_id, play, run

NAMES = [path.stem for path in sorted(exercises.SOLUTIONS.glob("*.ipynb"))]
VARIANT = 2027
CARD = re.compile(
    r"\*(Fill in|Build|What if|Find the fault|Explain) · difficulty [123] of 3 · (\d+) minutes · (\d+) points\*"
)
SOLUTION = re.compile(r"BEGIN SOLUTION.*?\n(.*?)^[^\n]*END SOLUTION", re.MULTILINE | re.DOTALL)
every_notebook = pytest.mark.parametrize("name", NAMES)


def solution(name):
    return nbformat.read(exercises.SOLUTIONS / f"{name}.ipynb", as_version=4)


def cells_of(notebook, **role):
    """The cells with these nbgrader properties."""
    marked = [cell for cell in notebook.cells if grade_id(cell)]
    return [cell for cell in marked if all(cell.metadata.nbgrader[key] == value for key, value in role.items())]


def answers(notebook):
    return cells_of(notebook, solution=True, grade=False)


def checks(notebook):
    return cells_of(notebook, solution=False, grade=True)


def explained(notebook):
    return cells_of(notebook, solution=True, grade=True)


def tasks(notebook):
    """(card, the cells that belong to it) for each task."""
    found = []
    for cell in notebook.cells:
        if cell.source.startswith("## Task "):
            found.append((cell, []))
        elif cell.source.startswith("## "):
            break
        elif found:
            found[-1][1].append(cell)
    return found


# What a learner gets


@every_notebook
def test_an_exercise_is_what_its_solution_generates(name):
    made = exercises.text(exercises.learner_copy(solution(name)))
    stored = (exercises.EXERCISES / f"{name}.ipynb").read_text(encoding="utf-8")
    assert stored == made, "run `make exercises`"


def test_there_is_an_exercise_for_each_notebook_and_no_other():
    notebooks = {path.stem for path in exercises.ROOT.glob("notebooks/*.ipynb")}
    taught = {name for name in notebooks if "01" <= name[:2] <= "13"}
    assert {path.stem for path in exercises.EXERCISES.glob("*.ipynb")} == set(NAMES) == taught


@every_notebook
def test_an_exercise_gives_nothing_away(name):
    made = exercises.learner_copy(solution(name))
    assert not [cell for cell in made.cells if cell.get("outputs") or cell.get("execution_count")]
    shown = "\n".join(cell.source for cell in made.cells)
    for word in ("SOLUTION", "HIDDEN", "Mark scheme"):
        assert word not in shown
    code = "\n".join(cell.source for cell in made.cells if cell.cell_type == "code")
    for cell in [*answers(solution(name)), *explained(solution(name))]:
        hidden = [line.strip() for part in SOLUTION.findall(cell.source) for line in part.splitlines()]
        assert hidden, f"{grade_id(cell)} has no marked solution"
        assert not [line for line in hidden if len(line) > 30 and not line.endswith(":") and line in code]


# What the checks say


@every_notebook
def test_the_solution_passes_every_check(name):
    assert set(play(name).checks) == {grade_id(cell) for cell in answers(solution(name))}


@every_notebook
def test_the_solution_passes_with_other_numbers_too(name):
    numbers = [str(play(name, variant).names["given"]) for variant in (0, VARIANT)]
    assert numbers[0] != numbers[1]


@every_notebook
def test_an_empty_answer_is_not_attempted_yet(name):
    for cell in answers(exercises.learner_copy(solution(name))):
        task = grade_id(cell)
        names = dict(play(name).before[task])
        run(cell.source, names, task)
        with pytest.raises(NotAttempted, match="not attempted yet"):
            run(play(name).checks[task], names, f"check_{task}")


PLANTED = [(name, wrong) for name in NAMES for wrong in wrong_answers.wrong_answers(name)]


@pytest.mark.parametrize(("name", "wrong"), PLANTED, ids=lambda each: each if isinstance(each, str) else each.task)
def test_a_wrong_answer_gets_the_message_that_names_its_slip(name, wrong):
    said = wrong_answers.message(name, wrong)
    assert said, f"{wrong.slip}: the check passed it"
    assert wrong.says in said, f"{wrong.slip}: expected {wrong.says!r} in {said!r}"


@every_notebook
def test_two_wrong_answers_are_planted_for_each_task(name):
    planted = Counter(wrong.task for wrong in wrong_answers.wrong_answers(name))
    wanted = {grade_id(cell) for cell in answers(solution(name))}
    assert set(planted) == wanted
    assert not [task for task, count in planted.items() if count < 2]


# What a task looks like


@every_notebook
def test_each_task_is_a_card_an_answer_and_its_points(name):
    notebook = solution(name)
    found = tasks(notebook)
    assert 4 <= len(found) <= 8
    minutes = points = 0
    for number, (card, cells) in enumerate(found, start=1):
        assert card.source.startswith(f"## Task {number}: ") and "**Goal.**" in card.source
        kind, card_minutes, card_points = CARD.search(card.source).groups()
        graded = [cell for cell in cells if cell.metadata.get("nbgrader", {}).get("grade")]
        assert [cell.metadata.nbgrader["points"] for cell in graded] == [int(card_points)], card.source
        assert kind == "Explain" or any("<summary>Hint 1</summary>" in cell.source for cell in [card, *cells])
        minutes, points = minutes + int(card_minutes), points + int(card_points)
    title = notebook.cells[0].source
    assert title.startswith(f"# Exercises {name[:2]}: ")
    assert f"{points} points" in title, f"the cards have {points} points"
    stated = int(re.search(r"About (\d+) minutes", title)[1])
    assert abs(stated - minutes) <= 5, f"the cards have {minutes} minutes"


@every_notebook
def test_each_check_follows_its_answer_and_lets_run_all_go_on(name):
    notebook = solution(name)
    assert len(answers(notebook)) == len(checks(notebook))
    for answer, check in zip(answers(notebook), checks(notebook), strict=True):
        assert grade_id(check) == f"check_{grade_id(answer)}"
        assert check.source.startswith("from specdec_lite.checks.")
        assert "raises-exception" in check.metadata.tags
        assert '"""' in answer.source and ("->" in answer.source or "class " in answer.source), grade_id(answer)


def test_there_are_60_to_100_tasks():
    assert 60 <= sum(len(tasks(solution(name))) for name in NAMES) <= 100


def test_every_kind_of_task_is_there():
    found = {CARD.search(card.source)[1] for name in NAMES for card, _ in tasks(solution(name))}
    assert found == {"Fill in", "Build", "What if", "Find the fault", "Explain"}


@every_notebook
def test_the_page_for_instructors_has_the_minutes_and_points_of_the_cards(name):
    cards = [CARD.search(card.source) for card, _ in tasks(solution(name))]
    minutes, points = (sum(int(card[group]) for card in cards) for group in (2, 3))
    page = (exercises.ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {name[:2]} .*$", page, re.MULTILINE)[:1]
    assert row.endswith(f" {minutes} min | {points} |"), row


# A class of one's own


def test_a_course_folder_has_other_numbers_and_no_answers(tmp_path):
    exercises.write_course(VARIANT, tmp_path)
    (name,) = {path.stem for path in tmp_path.glob("source/02*/*.ipynb")}
    source, release = (nbformat.read(tmp_path / step / name / f"{name}.ipynb", 4) for step in ("source", "release"))
    assert any(f"VARIANT = {VARIANT}" in cell.source for cell in release.cells)
    assert any("BEGIN SOLUTION" in cell.source for cell in source.cells)
    assert not any("BEGIN SOLUTION" in cell.source for cell in release.cells)
    assert (tmp_path / "nbgrader_config.py").exists()


@pytest.mark.parametrize("variant", ["-1", "next year"])
def test_a_variant_is_a_number_from_0_on(variant, capsys):
    with pytest.raises(SystemExit):
        exercises.main(["--variant", variant])
    assert "variant" in capsys.readouterr().err


def test_the_page_of_wrong_answers_is_what_the_checks_say():
    assert (exercises.ROOT / wrong_answers.PAGE).read_text(encoding="utf-8") == wrong_answers.page()
