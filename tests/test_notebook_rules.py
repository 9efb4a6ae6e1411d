"""What every notebook keeps to, so that it reads well, diffs well and shows on GitHub."""

import copy
import json
import re
from pathlib import Path

import nbformat
import pytest

from tools import links
from tools.notebooks import METADATA, clean

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [path for room in ("notebooks", "solutions") for path in sorted(ROOT.glob(f"{room}/*.ipynb"))]
LONGEST_CELL = 15  # lines
LONGEST_ANSWER = 35  # the signature, the docstring and the answer itself
MACHINE_PATH = re.compile(r"/(root|home|tmp|work|Users)/|[A-Z]:\\\\+Users")
PROJECT = links.Project.read(ROOT)
GOOD_FIGURE = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}, "metadata": {}}


def headings(cell):
    """The H1 lines of a markdown cell; a comment inside a fenced block is none."""
    return re.findall(r"^# .+$", re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def broken_rules(notebook):
    """What is wrong with a notebook, a sentence each."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    titles = [title for cell in notebook.cells if cell.cell_type == "markdown" for title in headings(cell)]
    if len(titles) != 1 or not headings(notebook.cells[0]):
        yield f"one H1, in the first cell: found {titles}"
    if "widgets" in notebook.metadata:
        yield "metadata.widgets is stored: GitHub shows an invalid notebook"
    elif notebook.metadata != METADATA:
        yield "metadata differ from what `make notebooks` writes"
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "the outputs are not those of one run from top to bottom: run `make notebooks`"
    if MACHINE_PATH.search(json.dumps(notebook.cells)):
        yield f"a path of one machine is stored: {MACHINE_PATH.search(json.dumps(notebook.cells))[0]}"
    if [cell.source for cell in code if "setup" in cell.metadata.get("tags", [])] != [PROJECT.setup()]:
        yield "there is not exactly one set-up cell, or it is out of step: run `make links`"
    for cell in code:
        yield from broken_rules_of_a_cell(cell)


def broken_rules_of_a_cell(cell):
    name = f"the cell that begins with {cell.source.splitlines()[:1]}"
    lines = len(cell.source.splitlines())
    longest = LONGEST_ANSWER if cell.metadata.get("nbgrader", {}).get("solution") else LONGEST_CELL
    if lines > longest:
        yield f"{name} has {lines} lines; {longest} is the most"
    if any(output.output_type == "error" for output in cell.outputs):
        yield f"{name} stores an error"
    if any("image/png" in output.get("data", {}) for output in cell.outputs) and "alt=" not in cell.source:
        yield f"{name} shows a figure without alt text: specdec_lite.plots.show(figure, alt=...)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_notebook_keeps_the_rules(path):
    broken = list(broken_rules(nbformat.read(path, as_version=4)))
    assert not broken, f"{path.name}:\n- " + "\n- ".join(broken)


def small_notebook():
    """A notebook that keeps every rule."""
    tagged = {"metadata": {"tags": ["setup"]}}
    cells = [
        nbformat.v4.new_markdown_cell("# Title\n\n```python\n# a comment\n```"),
        nbformat.v4.new_code_cell(PROJECT.setup(), execution_count=1, **tagged),
        nbformat.v4.new_code_cell('show(figure, alt="a line")', execution_count=2, outputs=[GOOD_FIGURE]),
    ]
    return nbformat.from_dict(nbformat.v4.new_notebook(cells=cells, metadata=METADATA))


def test_a_good_notebook_breaks_no_rule():
    assert not list(broken_rules(small_notebook()))


FAULTS = {
    "one H1": lambda notebook: notebook.cells.append(nbformat.v4.new_markdown_cell("# Another")),
    "metadata.widgets": lambda notebook: notebook.metadata.update(widgets={}),
    "metadata differ": lambda notebook: notebook.metadata.language_info.update(version="3.11.7"),
    "not those of one run": lambda notebook: notebook.cells[2].update(execution_count=3),
    "a path of one machine": lambda notebook: notebook.cells[0].update(source="# Title\n" + "/" + "tmp/x"),
    "out of step": lambda notebook: notebook.cells[1].update(source="import specdec_lite"),
    "the most": lambda notebook: notebook.cells[2].update(source="alt=0\n" * (LONGEST_CELL + 1)),
    "stores an error": lambda notebook: notebook.cells[2].outputs.append(
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    ),
    "without alt text": lambda notebook: notebook.cells[2].update(source="show(figure)"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_found_and_named(message):
    notebook = small_notebook()
    FAULTS[message](notebook)
    (broken,) = broken_rules(notebook)
    assert message in broken


def test_storing_a_notebook_takes_out_widgets_versions_and_dates():
    notebook = small_notebook()
    untidy = copy.deepcopy(notebook)
    untidy.metadata.update(widgets={"state": {}}, language_info={"name": "python", "version": "3.11.7"})
    untidy.cells[2].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    untidy.cells[2].outputs[0]["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "f00"}
    clean(untidy)
    assert untidy == notebook


def test_links_fills_in_the_tagged_cells_and_nothing_else():
    notebook = small_notebook()
    notebook.cells[1].source = "old"
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell("old", metadata={"tags": ["badges"]}))
    text = links.notebook(nbformat.writes(notebook) + "\n", PROJECT, "notebooks/x.ipynb")
    notebook.cells[1].source = PROJECT.badges("notebooks/x.ipynb")
    notebook.cells[2].source = PROJECT.setup()
    assert text == nbformat.writes(notebook) + "\n"


def test_a_notebook_without_a_set_up_cell_is_refused():
    with pytest.raises(ValueError, match="0 cells are tagged `badges`"):
        links.notebook(nbformat.writes(small_notebook()), PROJECT, "notebooks/x.ipynb")
