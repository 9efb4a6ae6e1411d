"""The two tables of tools/grade.py: a row for each task, and a row for each student."""

import csv
from collections import Counter, defaultdict
from pathlib import Path

from tools.grade_worker import NotGraded

TO_READ = "to be read"
COLUMNS = ["student", "notebook", "task", "points", "out of", "note", "file", "hash"]
TOTALS = ["student", "points", "out of", TO_READ]


def plain(text: str) -> str:
    """A text from a learner for a table: a spreadsheet takes some for formulas, and a file cannot hold all of it."""
    text = text.replace("\0", "").encode("utf-8", "backslashreplace").decode("utf-8")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def totals(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A row for each student. Everybody's points are out of all notebooks that anybody handed in."""
    files: dict = defaultdict(float)
    unread, out_of = Counter[str](), {}
    for row in rows:
        unread[row["student"]] += not row["points"]
        out_of[row["notebook"], row["task"]] = float(row["out of"])
        files[row["student"], row["notebook"], row["file"]] += float(row["points"] or 0)
    best: dict = defaultdict(Counter)
    for (student, notebook, _), points in files.items():
        best[student][notebook] = max(points, best[student][notebook])
    whole = f"{sum(out_of.values()):g}"
    numbers = [(student, f"{sum(best[student].values()):g}", whole, unread[student]) for student in sorted(best)]
    return [dict(zip(TOTALS, map(str, each), strict=True)) for each in numbers]


def read_csv(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """A table of ours; no rows if there is none."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(reader := csv.DictReader(file))
        if reader.fieldnames != columns:
            raise NotGraded(f"{path} holds something else, and is left alone; name another file: OUT=other.csv")
        sum(float(row["points"] or 0) for row in rows)
    except (ValueError, csv.Error) as error:
        raise NotGraded(f"{path} must be in UTF-8, with points like 2 or 2.5, and is left alone: {error}") from error
    return rows


def write_csv(path: Path, rows: list[dict[str, str]], columns: list[str]) -> None:
    """Write a table in one step: there is the old one, or the new one. The mark of UTF-8 is for spreadsheets."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
