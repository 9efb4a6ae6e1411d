"""The benchmark's memory: one JSON object per line, appended as it comes, so that a run can be killed and resumed.

The first record holds the settings. Each later one is complete in itself. A line that a kill cut short is dropped when
the file is opened again.
"""

import json
from pathlib import Path
from typing import Any

VERSION = 1  # of the format; a file of another one is refused

Record = dict[str, Any]


class Results:
    """The records of one benchmark, in memory and, when it has a path, in a file.

    settings: what decides which work is done and on what. A file that holds other settings is refused: its runs must
    not be mixed with these. Raises ``ValueError`` that names the first difference.
    """

    def __init__(self, settings: Record, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.suffix != ".jsonl":  # the report is beside it, in .md and .png
            raise ValueError(f"a results file must end in .jsonl, and {self.path} does not")
        self.records: list[Record] = []
        if self.path is not None and self.path.exists() and self.path.stat().st_size:
            self.records = read_results(self.path)
            same_settings(self.records[0], settings, self.path)
            write_lines(self.path, self.records)  # without the line that a kill cut short
        else:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self.append("settings", version=VERSION, **settings)

    def append(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, **fields}
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(record) + "\n")

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def read_results(path: str | Path) -> list[Record]:
    """The records of a results file; the first one holds the settings.

    Raises ``ValueError`` when the file is not one, or comes from another version.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no results file {path}: make one with `specdec bench --out {path}`")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines) and records:
                break
            raise ValueError(f"{path} is not a results file: line {number} is no JSON; give another --out") from None
    strays = [n for n, record in enumerate(records, start=1) if not isinstance(record, dict) or "kind" not in record]
    if strays:
        raise ValueError(f"{path} is not a results file: line {strays[0]} is no record; give another --out")
    if not records or records[0]["kind"] != "settings":
        raise ValueError(f"{path} is not a results file: it does not begin with its settings; give another --out")
    if records[0].get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {records[0].get('version')}, and this library reads version {VERSION}: "
            "measure again into another file (--out), or read it with the library that wrote it"
        )
    return records


def same_settings(found: Record, wanted: Record, path: Path) -> None:
    for key, value in json.loads(json.dumps(wanted)).items():
        if found.get(key) != value:
            raise ValueError(
                f"{path} holds another run: its {key} is {found.get(key)!r}, and now it is {value!r}. "
                "Resume with the same settings, or give another --out"
            )


def write_lines(path: Path, records: list[Record]) -> None:
    """Replace the file in one step: an interruption leaves the old one."""
    unfinished = path.with_suffix(path.suffix + ".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8", newline="\n")
    unfinished.replace(path)
