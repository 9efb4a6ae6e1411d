"""tools/grade.py: everybody gets the points that they earned, whatever the others handed in, and gets at nothing else.

The notebook has four tasks of 1, 2, 4 and 8 points, so a sum says which of them were solved. The class is graded once.
"""

import copy
import csv
import io
import json
import os
import socket
import sys
from types import SimpleNamespace

import pytest

from tools import grade, grade_worker
from tools.grade import NotGraded, assemble, cells_of, grade_folder, main, read_course
from tools.grade_table import plain, totals
from tools.grade_worker import Limits, environment, leave_with, next_answer, result, run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of memory, and slower ones of time")
LIMITS = Limits(cell=3, total=300, grace=1, memory=2**30, file=10**6)
VARIANT = 2027
SET_BY_LIBRARIES = {"TORCHINDUCTOR_CACHE_DIR", "LC_CTYPE"}


def code(source, **marks):
    metadata = {"nbgrader": {"schema_version": 3, **marks}} if marks else {}
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": [], "execution_count": None}


def answer(name, source):
    return code(source, grade_id=name, solution=True, grade=False, locked=False)


def check(name, points, source):
    return code(source, grade_id=f"check_{name}", solution=False, grade=True, locked=True, points=points)


def words(source):
    marks = {"schema_version": 3, "grade_id": "why", "solution": True, "grade": True, "locked": False, "points": 8}
    return {"cell_type": "markdown", "metadata": {"nbgrader": marks}, "source": source}


def notebook(*cells):
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"language_info": {"name": "python"}}, "cells": list(cells)}


DOUBLE = "def double(x):\n    return 2 * x"
SQUARE = "def square(x):\n    return x * x"
TOTAL = "import torch\n\ndef total(x):\n    return x.sum()"
CHECK_DOUBLE = "assert double(given) == 2 * given, 'double: not twice'"
CHECK_SQUARE = "assert square(3) == 9, 'square: that is not 9'"
CHECK_TOTAL = "import torch\nassert torch.equal(total(torch.ones(3)), torch.tensor(3.0)), 'total: not 3'"
HIDDEN = "\nassert double(-1) == -2, 'double: wrong below 0'"


def tiny(double=DOUBLE, square=SQUARE, total=TOTAL, why="Because.", hidden="", variant=VARIANT):
    """The notebook, with these answers, for a class with this number."""
    given = f"VARIANT = {variant}  # your class may use another number\ngiven = 3 + VARIANT"
    return notebook(
        code(given, grade_id="given", locked=True),
        code("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()"),
        answer("double", double),
        check("double", 1, CHECK_DOUBLE + hidden),
        answer("square", square),
        check("square", 2, CHECK_SQUARE),
        answer("total", total),
        check("total", 4, CHECK_TOTAL),
        words(why),
    )


STUB = "def {}(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"
UNSOLVED = {name: STUB.format(name) for name in ("double", "square", "total")} | {"why": "YOUR ANSWER HERE"}


def add(made, position, *sources):
    """The notebook with cells of the learner's own before the cell at ``position``."""
    made["cells"][position:position] = [code(source) for source in sources]
    return made


def partly():
    """Numbers of another class, with answers for those; a cell that fails, and one that does not even parse."""
    return add(tiny("def double(x):\n    return 6", "square = = 3", variant=0), 2, "1 / 0")


def torn():
    """Other ids for the answer and the check of double; no given and no check of total, whose answer is a text cell."""
    cells = tiny(total="def total(x):\n    return 3")["cells"]
    cells[6]["cell_type"] = "markdown"
    for cell in cells[2:4]:
        cell["metadata"]["nbgrader"]["grade_id"] += "2"
    return notebook(*cells[1:7])


def tampered():
    """Checks emptied, paid better, turned into text, doubled; and four ways to make `import torch` or a cell lie."""
    cheat = """
import sys, types, torch
lies = types.SimpleNamespace(equal=lambda *_: True, ones=str, tensor=str)
def total(x):
    return x
torch.equal = lies.equal
sys.modules["torch"] = lies
get_ipython().input_transformers_cleanup.append(lambda lines: [])
__builtins__ = {"__import__": lambda *_: lies}
"""
    made = tiny("def double(x):\n    return abs(2 * x)", total=cheat, why=" ")
    cells = made["cells"]
    cells[3]["source"], cells[3]["metadata"]["nbgrader"]["points"] = "pass", 100
    cells[5]["cell_type"] = "markdown"
    cells[6:6] = [copy.deepcopy(cells[5]), answer("square", "def square(x):\n    return 0")]
    return made


def greedy(place, port):
    """Wants too much memory, output, disk and time, and what is not its own. Refusals are hidden; only notes can tell.

    double never ends. Neither does square, and it cannot be interrupted.
    """

    def tries(line):
        return f"import os\ntry:\n    {line}\nexcept PermissionError:\n    pass"

    stubborn = (
        "while True:\n        try:\n            sum(range(1000))\n        except BaseException:\n            pass"
    )
    made = tiny("def double(x):\n    while True:\n        pass", f"def square(x):\n    {stubborn}")
    made["cells"][1]["outputs"] = ["LARGE"]
    annas, ours = str(place / "class/anna/01_tiny.ipynb"), str(place / "solutions/01_tiny.ipynb")
    return add(
        made,
        0,
        "import numpy\nhoard = []\nfor _ in range(1000):\n    hoard.append(numpy.empty(10**7))",
        "import os\nfor _ in range(200):\n    print('x' * 10**6)\nos.write(1, b'{}\\n' * 100)",
        "open('large', 'wb').write(bytes(2 * 10**6))",
        tries(f"open({annas!r}).read()"),
        tries(f"os.listdir({str(place / 'class')!r})"),
        tries(f"os.symlink({annas!r}, 'link')"),
        tries(f"open({ours!r})"),
        tries(f"open({str(place / 'grades.csv')!r})"),
        tries(f"open({str(place / 'outside')!r}, 'w')"),
        tries(f"os.remove({ours!r})"),
        tries(f"os.open({str(place)!r}, os.O_RDONLY)"),
        tries("os.system('true')"),
        tries("__import__('subprocess').run(['true'])"),
        tries(f"__import__('socket').create_connection(('127.0.0.1', {port}))"),
        tries("open(f'/proc/{os.getppid()}/environ').read()"),
        "os.remove('large'); open('mine', 'w').write('x'); os.remove('mine'); await __import__('asyncio').sleep(0)",
        f"raise RuntimeError(set(os.environ) - {set(environment('')) | SET_BY_LIBRARIES}, os.listdir())",
        "import os; assert os.pread(0, 9, 0) == b''; input()",  # not even our job can be read there
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A course and its class, which was graded: grades.csv is what came out."""
    place = tmp_path_factory.mktemp("grading")
    hidden = "\nassert double(-1) == -2, 'double: wrong below 0'"
    course = {"solutions": tiny(hidden=hidden, variant=0), "exercises": tiny(**UNSOLVED, variant=0)}
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        class_ = {
            "anna/01_tiny.ipynb": tiny(),
            "anna/01_tiny (1).ipynb": "",
            "ben__01_tiny.ipynb": tiny(**UNSOLVED),
            "cem/01_tiny/01_tiny.ipynb": partly(),
            "dora/my 01_tiny.ipynb": torn(),
            "eve/01_tiny.ipynb": tampered(),
            "gus/01_tiny.ipynb": greedy(place, server.getsockname()[1]),
            "ivy/01_tiny.ipynb": "def double(x): ...",
            "jon/01_tiny.ipynb": tiny() | {"metadata": {"language_info": {"name": "R"}}},
            "kim/01_tiny.ipynb": json.dumps(tiny())[:-100],
            "=lea/homework.txt": "it is in the other file",
            "mia/.ipynb_checkpoints/01_tiny.ipynb": "",
        }
        for name, made in {f"class/{name}": made for name, made in class_.items()}.items():
            write(place / name, made)
        for folder, made in course.items():
            write(place / folder / "01_tiny.ipynb", made)
        for folder in ("nils", "olga", "pat/01_tiny.ipynb", "quin"):
            (place / "class" / folder).mkdir(parents=True)
        os.mkfifo(place / "class/quin/01_tiny.ipynb")
        (place / "class/nils/01_tiny.ipynb").symlink_to(place / "class/anna/01_tiny.ipynb")
        patch.setenv("TOKEN", "hunter2")
        grade_folder(place / "class", place / "grades.csv", VARIANT, place, LIMITS)
    write(place / "class/gus/01_tiny.ipynb", "")  # 200 MB less
    return place


def write(path, made):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = made if isinstance(made, str) else json.dumps(made)
    path.write_text(text.replace('"LARGE"', f'"{"x" * 200_000_000}"'), encoding="utf-8")


def rows(place, student):
    with (place / "grades.csv").open(newline="", encoding="utf-8-sig") as file:
        return [row for row in csv.DictReader(file) if row["student"] == student]


def notes(place, student):
    return {row["task"]: row["note"] for row in rows(place, student)}


@pytest.mark.parametrize(
    ("student", "double", "square", "total", "why"),
    [
        ("ben", "0", "0", "0", "0"),
        ("cem", "0", "0", "4", ""),
        ("dora", "1", "2", "0", ""),
        ("eve", "0", "2", "0", "0"),
        ("gus", "0", "0", "4", ""),
        ("ivy", "0", "0", "0", "0"),
        ("jon", "0", "0", "0", "0"),
        ("kim", "0", "0", "0", "0"),
        ("nils", "0", "0", "0", "0"),
        ("pat", "0", "0", "0", "0"),
        ("quin", "0", "0", "0", "0"),
    ],
)
def test_everybody_gets_the_points_that_they_earned(place, student, double, square, total, why):
    earned = [(row["task"], row["points"], row["out of"]) for row in rows(place, student)]
    checks = [("check_double", double, "1"), ("check_square", square, "2"), ("check_total", total, "4")]
    assert earned == [*checks, ("why", why, "8")]


def test_a_perfect_notebook_has_all_points_and_no_note(place):
    perfect = [(row["points"], row["note"]) for row in rows(place, "anna") if row["file"] == "anna/01_tiny.ipynb"]
    assert perfect == [("1", ""), ("2", ""), ("4", ""), ("", "to be read")]


def test_what_is_no_notebook_is_reported_by_name(place):
    no_notebook = "not run: it is no notebook, or only a part of one"
    assert set(notes(place, "ivy").values()) == set(notes(place, "kim").values()) == {no_notebook}
    assert set(notes(place, "jon").values()) == {"not run: its kernel is for R, not for Python"}
    for student in ("nils", "pat", "quin"):  # a link to anna's, a folder, a pipe
        assert notes(place, student)["why"] == "not run: it is a link or a folder, or larger than 500 MB"
    assert notes(place, "olga") == notes(place, "'=lea") == {"": "not run: its name contains that of no notebook"}
    assert rows(place, "'=lea")[0]["file"] == "'=lea/homework.txt"
    assert not rows(place, "mia")


def test_a_cell_that_fails_is_named_and_the_rest_counts(place):
    said = notes(place, "cem")
    assert "cell 3: ZeroDivisionError: division by zero" in said["check_double"]
    assert said["check_square"].startswith("square: SyntaxError: ")
    assert said["check_square"].endswith("; NameError: name 'square' is not defined")


def test_a_variant_has_its_own_numbers(place):
    said = notes(place, "cem")["check_double"]
    assert said.startswith("read-only cell given had been changed: ours was used; ")
    assert said.endswith("; AssertionError: double: not twice")


def test_lost_cells_are_put_back(place):
    said = notes(place, "dora")
    put_back = "was missing: ours was put back"
    assert said["check_double"] == (
        f"read-only cell given {put_back}; answer cell double was missing; check cell check_double {put_back}"
    )
    assert said["check_square"] == ""
    assert said["check_total"].startswith(f"check cell check_total {put_back}; TypeError: ")
    assert said["why"] == "written cell why was missing: look for its text elsewhere; to be read"


def test_tampering_is_reported_and_gives_nothing(place):
    said = notes(place, "eve")
    assert said["check_double"] == (
        "check cell check_double had been changed: ours was used; AssertionError: double: wrong below 0"
    )
    assert said["check_square"] == (
        "answer cell square stood there more than once: the copy was run as ordinary code; "
        "check cell check_square stood there more than once: the first one counts"
    )
    assert said["check_total"] == "AssertionError: total: not 3"


def test_an_endless_loop_costs_only_its_own_cell(place):
    said = notes(place, "gus")
    assert said["check_double"].endswith("; TimeUp: stopped after 3 s")
    assert said["check_square"] == "killed after 4 s"
    assert said["check_total"] == ""


def test_memory_output_and_files_are_limited(place):
    said = notes(place, "gus")["check_double"].split("; ")
    if sys.platform == "linux":  # macOS does not limit memory
        assert said[0] == "cell 1: it ran out of memory"
    assert not [note for note in said if note.startswith("cell 2:")]  # 200 MB of output
    assert "cell 3: OSError: [Errno 27] File too large" in said


def test_what_is_refused_is_reported(place):
    refused = [
        note.split(": refused: ") for note in notes(place, "gus")["check_double"].split("; ") if "refused" in note
    ]
    parent = f"reading /proc/{os.getpid()}/environ" if sys.platform == "linux" else None
    assert dict(refused) == {
        "cell 4": f"reading {place}/class/anna/01_tiny.ipynb",
        "cell 5": f"listing {place}/class",
        "cell 6": f"os.symlink of {place}/class/anna/01_tiny.ipynb",
        "cell 7": f"reading {place}/solutions/01_tiny.ipynb",
        "cell 8": f"reading {place}/grades.csv",
        "cell 9": f"writing to {place}/outside",
        "cell 10": f"os.remove of {place}/solutions/01_tiny.ipynb",
        "cell 11": f"writing to {place}",
        "cell 12": "os.system",
        "cell 13": "subprocess.Popen",
        "cell 14": "socket.getaddrinfo",
        **({"cell 15": parent} if parent else {}),
    }
    assert not (place / "outside").exists()


def test_a_submission_finds_an_empty_folder_no_input_and_none_of_our_environment(place):
    said = notes(place, "gus")["check_double"].split("; ")
    assert "cell 16" not in str(said)  # its own files, and code that awaits
    assert "cell 17: RuntimeError: (set(), [])" in said
    assert "cell 18: EOFError: EOF when reading a line" in said
    assert "hunter2" not in (place / "grades.csv").read_text(encoding="utf-8")


def test_totals_count_the_better_of_two_files_and_all_notebooks_of_the_class(place):
    with (place / "grades-totals.csv").open(newline="", encoding="utf-8-sig") as file:
        table = {row["student"]: (row["points"], row["out of"], row["to be read"]) for row in csv.DictReader(file)}
    assert table["anna"] == ("7", "15", "1")
    assert table["eve"] == ("2", "15", "0")
    assert table["'=lea"] == ("0", "15", "0")
    a = {"student": "a", "notebook": "01", "task": "t", "points": "2", "out of": "3", "file": "1"}
    b = a | {"student": "b", "notebook": "02", "points": "", "out of": "4"}
    both = [a, a | {"points": "3", "file": "2"}, b]
    assert [tuple(row.values()) for row in totals(both)] == [("a", "3", "7", "0"), ("b", "0", "7", "1")]


@pytest.fixture
def class_of(tmp_path, monkeypatch):
    """class_of(name=notebook, ...): a folder with a course and a class. Nothing runs: every check is passed.

    ``again()`` grades it and returns whose submissions were run, by how they answered in words.
    """

    class Class:
        place = tmp_path

        def __init__(self):
            self.ran = []

        def hand_in(self, **answers):
            for student, made in answers.items():
                write(tmp_path / "class" / student / "01_tiny.ipynb", made)

        def again(self, folder="class", variant=0):
            self.ran.clear()
            grade_folder(tmp_path / folder, tmp_path / "grades.csv", variant, tmp_path, LIMITS)
            return sorted(self.ran)

    made = Class()

    def pass_all(steps, limits, roots):
        made.ran.append(steps[-1]["source"])
        if steps[-1]["source"] == "crash":
            raise KeyboardInterrupt
        return {step["name"]: result() for step in steps}

    monkeypatch.setattr(grade, "run", pass_all)
    for folder, answers in {"solutions": {}, "exercises": UNSOLVED}.items():
        write(tmp_path / folder / "01_tiny.ipynb", tiny(**answers, variant=0))
    return made


def signed(name):
    """A notebook whose last cell says its name."""
    return notebook(*tiny(variant=0)["cells"], code(name))


def test_a_second_run_grades_only_what_is_new_or_changed(class_of):
    class_of.hand_in(anna=signed("anna"), ben=signed("ben"))
    assert class_of.again() == ["anna", "ben"]
    by_hand = (class_of.place / "grades.csv").read_text(encoding="utf-8").replace(",why,,", ",why,8,")
    (class_of.place / "grades.csv").write_text(by_hand, encoding="utf-8")
    assert class_of.again() == []
    assert [row["points"] for row in rows(class_of.place, "anna")] == ["1", "2", "4", "8"]
    class_of.hand_in(ben=signed("ben again"), cem=signed("cem"))
    assert class_of.again() == ["ben again", "cem"]
    assert [row["points"] for row in rows(class_of.place, "ben")] == ["1", "2", "4", ""]
    assert class_of.again(variant=5) == ["anna", "ben again", "cem"]


def test_what_was_graded_before_a_crash_stays_and_the_rest_is_graded_later(class_of, monkeypatch):
    monkeypatch.setattr(grade, "AT_ONCE", 1)
    class_of.hand_in(anna=signed("anna"), ben=signed("crash"), cem=signed("cem"))
    with pytest.raises(KeyboardInterrupt):
        class_of.again()
    assert len(rows(class_of.place, "anna")) == 4
    assert not rows(class_of.place, "ben")
    class_of.hand_in(ben=signed("ben"))
    assert class_of.again()[0] == "ben"


def test_a_table_that_cannot_be_written_to_its_end_leaves_the_old_one(class_of, monkeypatch):
    class_of.hand_in(anna=signed("anna"))
    class_of.again()
    class_of.hand_in(ben=signed("ben"))
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(csv.DictWriter, "writerows", lambda *_: os.stat("/no disk"))
        class_of.again()
    assert len(rows(class_of.place, "anna")) == 4
    assert class_of.again() == ["ben"]


def test_tables_are_safe_to_open_in_a_spreadsheet(class_of):
    class_of.hand_in(anna=signed("anna"))
    class_of.again()
    assert (class_of.place / "grades.csv").read_bytes().startswith(b"\xef\xbb\xbfstudent,")  # or Zoë is ZoÃ«
    assert rows(class_of.place, "anna")[0]["hash"].startswith("h")  # 12e4 and 007 come back as other numbers
    assert [plain(text) for text in ("=1+1", "@a", "-", "1-1")] == ["'=1+1", "'@a", "'-", "1-1"]
    assert plain("\udce9\0") == "\\udce9"  # what no file can hold is seen as the same in the next run


@pytest.mark.parametrize(
    ("points", "encoding"),
    [("2,5", "utf-8"), ("two", "utf-8"), ("8", "cp1252")],
)
def test_a_table_that_was_spoiled_by_hand_is_left_alone(class_of, capsys, points, encoding):
    class_of.hand_in(anna=signed("anna"), zoë=signed("zoë"))
    class_of.again()
    table = class_of.place / "grades.csv"
    spoiled = table.read_text(encoding="utf-8-sig").replace(",why,,", f',why,"{points}",').encode(encoding)
    table.write_bytes(spoiled)
    with pytest.raises(SystemExit) as stopped:
        main([str(class_of.place / "class"), "--out", str(table)])
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert said.startswith(f"grade: {table} must be in UTF-8, with points like 2 or 2.5") and said.count("\n") == 1
    assert table.read_bytes() == spoiled


def test_rows_of_another_folder_are_kept(class_of):
    class_of.hand_in(anna=signed("anna"))
    class_of.again()
    write(class_of.place / "late/ben/01_tiny.ipynb", signed("ben"))
    assert class_of.again("late") == ["ben"]
    assert len(rows(class_of.place, "anna")) == 4


@pytest.mark.parametrize(
    ("folder", "out", "says"),
    [
        ("nowhere", "grades.csv", "there is no folder"),
        ("class", "nowhere/grades.csv", "must be in a folder that exists"),
        ("class", "class/grades.csv", "not among the submissions"),
        ("class", "other.csv", "holds something else, and is left alone"),
        ("class", "theirs.csv", "theirs-totals.csv holds something else, and is left alone"),
        ("class", "late", "Is a directory"),
    ],
)
def test_a_wrong_argument_is_one_line_before_any_work(class_of, capsys, folder, out, says):
    class_of.hand_in(anna=signed("anna"))
    (class_of.place / "late").mkdir()
    for name in ("other.csv", "theirs-totals.csv"):
        (class_of.place / name).write_text("my,own,table\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main([str(class_of.place / folder), "--out", str(class_of.place / out)])
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("grade: ") and says in said and said.count("\n") == 1
    assert (class_of.place / "other.csv").read_text(encoding="utf-8") == "my,own,table\n"
    assert class_of.ran == []


def test_a_missing_check_without_its_answer_comes_before_the_next_cell_of_ours(class_of):
    known = read_course(class_of.place, 0)["01_tiny"]
    cells = cells_of(json.dumps(torn()).encode("utf-8"))
    steps, _ = assemble(known, cells)
    names = [
        "given",
        "cell 1",
        "cell 2",
        "cell 3",
        "check_double",
        "square",
        "check_square",
        "total",
        "check_total",
        "why",
    ]
    assert [step.name for step in steps] == names


def test_a_variant_below_0_is_refused_before_everybody_gets_0(class_of, capsys):
    with pytest.raises(SystemExit):
        main([str(class_of.place / "class"), "--variant", "-1"])
    assert "--variant is -1; it must be 0 or more" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(grade, "grade_folder", stop)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        main(["class"])
    assert capsys.readouterr().out == "stopped; the same command goes on from here\n"


def test_a_process_whose_parent_was_killed_cleans_up_and_ends(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        leave_with(os.getppid() + 1, str(tmp_path))
    assert not tmp_path.exists()


def test_what_a_learners_code_writes_to_our_pipe_is_no_answer():
    def answer(line):
        process = SimpleNamespace(stdout=io.BytesIO(line), pid=0, kill=lambda: None)
        return next_answer(process, 60, "secret")

    right = json.dumps(result()).encode("utf-8")
    assert answer(b'{"secret": %s}\n' % right) == result()
    assert [answer(line) for line in (right, b'{"guess": %s}' % right, b"[]", b"junk", b"")] == [None] * 5


def test_cells_that_no_time_was_left_for_are_named(monkeypatch):
    monkeypatch.setattr(grade_worker, "attempt", lambda steps, *_: steps[0])
    said = run([{"name": "a"}, {"name": "b"}], Limits(total=0), {})
    assert said["b"]["error"] == "not run: the 0 s for all cells were used up"


def test_a_process_that_does_not_start_is_no_fault_of_the_class(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NotGraded, match="a process did not start"):
        run([], LIMITS, {})
