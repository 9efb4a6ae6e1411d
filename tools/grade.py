"""Grade a folder of submissions without nbgrader, and write the points to a CSV.

    python tools/grade.py folder --variant 2027 --out grades.csv    (and the sums, in grades-totals.csv)

**Which file belongs to whom.** A file belongs to the notebook whose name its own name contains. The student is the
first folder that it is in: `anna/02_x.ipynb`, or nbgrader's `submitted/anna/02_x/02_x.ipynb`. Without a folder, it is
what stands before the notebook's name, or else behind it: `anna__02_x.ipynb`. What belongs to no notebook is reported.
If a notebook is handed in twice, both files are graded, and the total counts the better one.

**What is run.** The learner's code, cell by cell, in a process of its own for each submission: tools/grade_worker.py
has the limits, and what they do not protect from. Check cells and read-only cells are ours, from solutions/, with the
hidden tests: changed ones are replaced, missing ones put back, and of copies the first counts. The CSV says so. A cell
that fails, or has to be stopped, costs nothing but itself. Rows are written as they come. A second run goes on where
the first one stopped, and keeps what you filled in: answers in words have no points yet, and the note "to be read".
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs as a script too

from tools.grade_table import COLUMNS, TO_READ, TOTALS, plain, read_csv, totals, write_csv  # noqa: E402
from tools.grade_worker import Limits, NotGraded, environment, result, run  # noqa: E402
from tools.variants import with_number  # noqa: E402

NOT_RUN = "not run: "
LIMITS = Limits()
KINDS = {(True, False): "check", (True, True): "written", (False, True): "answer"}  # (has points, is answered)
TASKS = "check", "written"  # the kinds of cells that have points
Known = dict[str, "Cell"]  # our cells of a notebook by name, those that have a kind
AT_ONCE = 2  # processes
LARGEST = 500_000_000  # bytes of a notebook, its stored outputs included


@dataclass(frozen=True)
class Cell:
    """kind: "answer", "check", "read-only", "written" (an answer in words), or "" for any other."""

    name: str  # the grade_id, or "cell 5": the fifth of its notebook
    source: str
    code: bool
    kind: str = ""
    points: float = 0
    released: str = ""  # what the learner got


@dataclass(frozen=True)
class Submission:
    path: Path
    file: str  # the path within the folder of submissions
    student: str
    notebook: str  # "" if it belongs to none
    hash: str

    def row(self, task: Cell, points: float | str, note: str) -> dict[str, str]:
        values = task.name, points if points == "" else f"{points:g}", f"{task.points:g}", plain(note)
        return dict(zip(COLUMNS, (self.student, self.notebook, *values, self.file, self.hash), strict=True))


def read(path: Path) -> bytes:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            raise NotGraded(f"it is a link or a folder, or larger than {LARGEST // 10**6} MB")
        return path.read_bytes()
    except OSError as error:
        raise NotGraded(f"it cannot be read: {error.strerror}") from error


def cells_of(content: bytes) -> list[Cell]:
    """The cells of a notebook, without outputs. ``NotGraded`` if it is none, or is not in Python."""
    try:
        notebook = json.loads(content)
        cells = [cell_of(cell, number) for number, cell in enumerate(notebook["cells"], start=1)]
        about = notebook.get("metadata", {})
        languages = about.get("language_info", {}).get("name"), about.get("kernelspec", {}).get("language")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NotGraded("it is no notebook, or only a part of one") from error
    if other := [language for language in languages if "python" not in str(language or "python").lower()]:
        raise NotGraded(f"its kernel is for {other[0]}, not for Python")
    return cells


def cell_of(cell: dict, number: int) -> Cell:
    source, marks = cell.get("source", ""), cell.get("metadata", {}).get("nbgrader", {})
    text = source if isinstance(source, str) else "".join(source)
    kind = KINDS.get((marks.get("grade", False), marks.get("solution", False)), "read-only" if marks else "")
    name = str(marks.get("grade_id") or f"cell {number}")
    return Cell(name, text, cell.get("cell_type") == "code", kind, marks.get("points", 0))


def read_course(root: Path, variant: int) -> dict[str, Known]:
    """The course's notebooks by name, with the numbers of a variant, from a clone of the course."""

    def cells(path: Path) -> Known:
        return {cell.name: replace(cell, source=with_number(cell.source, variant)) for cell in cells_of(read(path))}

    course = {}
    for path in sorted(root.glob("solutions/*.ipynb")):
        if not (exercise := root / "exercises" / path.name).exists():
            raise NotGraded(f"{exercise} is missing; run `make exercises`")
        got, ours = cells(exercise), [cell for cell in cells(path).values() if cell.kind]
        course[path.stem] = {cell.name: replace(cell, released=got[cell.name].source) for cell in ours}
    return course


def find(folder: Path, course: dict[str, Known]) -> Iterator[Submission]:
    """The submissions in a folder, in the order of their names. The module's docstring has the rule."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink() and any(path.glob("*")):
            continue  # an empty one is reported: something was lost
        parts = path.relative_to(folder).parts
        if {"__MACOSX", "timestamp.txt"} & set(parts) or any(part.startswith(".") for part in parts):
            continue
        notebook = max((name for name in course if name in path.name), key=len, default="")
        before, _, behind = path.stem.partition(notebook or path.stem)
        student = parts[0] if len(parts) > 1 or path.is_dir() else (before or behind).strip("_-. ") or "(no name)"
        try:
            content = read(path)
        except NotGraded as error:
            content = str(error).encode("utf-8")
        digest = hashlib.sha256(content + repr(course.get(notebook)).encode("utf-8")).hexdigest()[:16]
        # Not a number, which a spreadsheet would round: "4e12".
        yield Submission(path, plain("/".join(parts)), plain(student), notebook, f"h{digest}")


def assemble(known: Known, cells: list[Cell]) -> tuple[list[Cell], dict[str, list[str]]]:
    """The cells to run, with all answers in words among them; and notes, by the name of the cell they are about."""
    steps: Known = {}
    notes: dict[str, list[str]] = defaultdict(list)
    for number, cell in enumerate(cells, start=1):
        mine = known.get(cell.name)
        if mine and cell.name in steps:
            what = "copy was run as ordinary code" if mine.kind == "answer" else "first one counts"
            notes[cell.name].append(f"{mine.kind} cell {cell.name} stood there more than once: the {what}")
        if not mine or mine.kind == "answer":
            name = cell.name if mine and cell.name not in steps else f"cell {number}"
            if cell.code or name in known:  # an answer that was made a text by mistake is run, as nbgrader does
                steps[name] = replace(cell, name=name, kind="answer" if name in known else "")
        elif mine.kind == "written":
            steps.setdefault(cell.name, replace(mine, source=cell.source))
        elif cell.name not in steps:
            steps[cell.name] = mine
            if cell.source.split() not in (mine.released.split(), mine.source.split()):
                notes[cell.name].append(f"{mine.kind} cell {cell.name} had been changed: ours was used")
    return put_back(known, list(steps.values()), notes), notes


def put_back(known: Known, steps: list[Cell], notes: dict[str, list[str]]) -> list[Cell]:
    """Add missing cells of ours: a check behind its answer, or else before our next cell; others behind our last."""
    names, answer = list(known), ""
    for number, (name, mine) in enumerate(known.items()):
        place = {step.name: index for index, step in enumerate(steps)}
        answer = name if mine.kind == "answer" else answer
        if mine.kind == "check" and answer not in place:
            notes[name].append(f"answer cell {answer} was missing")
        if mine.kind == "answer" or name in place:
            continue
        where = [0, *(place[other] + 1 for other in names[:number] if other in place)][-1]
        if mine.kind == "check" and answer not in place:
            where = [*(place[other] for other in names[number:] if other in place), len(steps)][0]
        steps.insert(where, mine)
        what = "look for its text elsewhere" if mine.kind == "written" else "ours was put back"
        notes[name].append(f"{mine.kind} cell {name} was missing: {what}")
    return steps


def tasks_of(known: Known) -> list[Cell]:
    """The cells that have a row; one without a name where nothing is known."""
    return [cell for cell in known.values() if cell.kind in TASKS] or [Cell("", "", False)]


def grade(submission: Submission, known: Known, limits: Limits, roots: dict[str, bool]) -> list[dict[str, str]]:
    """The rows of a submission. A note on no task stands with the task that comes next."""
    try:
        if not known:
            raise NotGraded("its name contains that of no notebook")
        steps, notes = assemble(known, cells_of(read(submission.path)))
    except NotGraded as why:
        return [submission.row(task, 0, f"{NOT_RUN}{why}") for task in tasks_of(known)]
    results = run([asdict(step) for step in steps if step.kind != "written"], limits, roots)
    rows, waiting = [], []  # of tasks; what was said since the last one
    for step in steps:
        error, refused = results.get(step.name, result()).values()
        points: float | str = 0 if error else step.points
        said = ([error] if error else []) + [f"refused: {what}" for what in refused]
        if step.kind == "written":
            blank = step.source.split() in ([], step.released.split())
            points, said = (0, ["not answered"]) if blank else ("", [TO_READ])
        waiting += notes[step.name] + [each if step.kind in TASKS else f"{step.name}: {each}" for each in said]
        if step.kind in TASKS:
            rows.append(submission.row(step, points, "; ".join(waiting)))
            waiting = []
    rows[-1]["note"] = "; ".join([rows[-1]["note"], *waiting]).strip("; ")
    return rows


def readable(*others: Path) -> dict[str, bool]:
    """What a learner's code may read, and may not: nothing of ``others``. See ``grade_worker.guard``."""
    yes = str(ROOT / "specdec_lite"), sys.prefix, sys.base_prefix, environment("")["MPLCONFIGDIR"]
    no = *others, ROOT, Path.home(), Path(tempfile.gettempdir()), Path("/proc")
    return dict.fromkeys(yes, True) | dict.fromkeys((str(path.resolve()) for path in no), False)


def grade_folder(folder: Path, out: Path, variant: int = 0, root: Path = ROOT, limits: Limits = LIMITS) -> list[dict]:
    """Grade what ``out`` does not hold yet, and add it there as it comes. Returns the totals, and writes them too."""
    if not folder.is_dir():
        raise NotGraded(f"there is no folder {str(folder)!r}; name that of the submissions: SUBMISSIONS=folder")
    if not out.resolve().parent.is_dir() or out.resolve().is_relative_to(folder.resolve()):
        raise NotGraded(f"{out} must be in a folder that exists, and not among the submissions; name another: OUT=file")
    totals_out = out.with_name(f"{out.stem}-totals.csv")
    before, _ = read_csv(out, COLUMNS), read_csv(totals_out, TOTALS)
    course = read_course(root, variant)
    submissions = list(find(folder, course))
    here = {each.file: each.hash for each in submissions}
    # What has not changed since, or belongs to another folder.
    rows = [row for row in before if here.get(row["file"], row["hash"]) == row["hash"]]
    write_csv(out, rows, COLUMNS)
    left = [each for each in submissions if each.file not in {row["file"] for row in rows}]
    roots = readable(root / "solutions", folder, out.resolve().parent)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        work = [pool.submit(grade, each, course.get(each.notebook, {}), limits, roots) for each in left]
        for done in as_completed(work):
            rows += (new := done.result())
            write_csv(out, rows, COLUMNS)
            earned, most = (sum(float(row[column] or 0) for row in new) for column in ("points", "out of"))
            why = new[0]["note"] if new[0]["note"].startswith(NOT_RUN) else f"{earned:g} of {most:g}"
            print(f"{new[0]['student']}, {new[0]['file']}: {why}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # if it is interrupted
    table = totals(rows)
    write_csv(totals_out, table, TOTALS)
    return table


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="the folder of submissions")
    parser.add_argument("--variant", type=int, default=0, help="the number of the class (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("grades.csv"), help="the CSV (default: grades.csv)")
    options = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not every console has every name
    if options.variant < 0:
        parser.error(f"--variant is {options.variant}; it must be 0 or more")
    try:
        table = grade_folder(options.folder, options.out, options.variant)
    except (NotGraded, OSError) as error:
        parser.exit(1, f"grade: {error}\n")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", flush=True)
        os._exit(130)  # not waiting for the cells that are running: they notice it
    for row in table:
        print(f"{row['student']}: {row['points']} of {row['out of']}, {row[TO_READ]} answers to be read")
    print(f"{options.out} has a row for each task; beside it is a file with these totals")


if __name__ == "__main__":
    main(sys.argv[1:])
