"""Run notebooks from top to bottom and store their outputs.

    python tools/notebooks.py                            all of notebooks/ and solutions/
    python tools/notebooks.py notebooks/02_*.ipynb       the named ones

Each notebook runs in a fresh kernel, in its own folder. Nothing is written unless it ran to its end; the first cell
that fails is named, and stops everything. What is stored holds no dates, no machine's names and no widget state, so a
second run changes only what really changed.
"""

import os
import sys
import time
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 (on a new machine this builds a cache and says so: here, not in a notebook)
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 600  # seconds
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"  # names a live object of one session
CELL_METADATA_TO_DROP = ("execution", "ExecuteTime", "collapsed", "scrolled", "colab", "outputId", "vscode")
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class NotebookError(Exception):
    """A notebook did not run to its end."""


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Execute all cells in place. Raises ``NotebookError`` naming the first cell that fails."""
    current = {}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors only
        record_timing=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: current.update(index=cell_index),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"cell {current['index']} (the first is 0) failed:\n{error}") from error


def clean(notebook: nbformat.NotebookNode) -> None:
    """Take out what differs from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        for key in CELL_METADATA_TO_DROP:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Replace the file in one step: an interrupted run leaves the old one."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    unfinished.replace(path)


def main(names: list[str]) -> int:
    os.environ.pop("MPLBACKEND", None)  # a fixed backend would keep figures out of the notebook
    os.environ["TQDM_DISABLE"] = "1"  # progress bars are not output
    every = [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("solutions/*.ipynb"))]
    for path in [Path(name).resolve() for name in names] or every:
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        try:
            run(notebook, path.parent)
        except NotebookError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        clean(notebook)
        write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
