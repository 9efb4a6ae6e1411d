"""Make slides for the lecture hall from the notebooks, a deck for each group of them.

    python tools/slides.py        writes build/slides/*.html

A deck is one file, and shows without a network. reveal.js 5.2.1 lies in tools/reveal with its licence (MIT) and is
written into the page; figures are inside it too; equations become MathML, which browsers set by themselves (Chrome and
Edge from version 109 on, Firefox, Safari). Making the decks needs nbconvert and math-core, from the extra `dev`, and no
network either. Nothing is executed: the outputs are those stored in the notebooks.

A heading of the first or second level begins a slide to the right; one of the third, or a numbered question, a slide
below. What is too tall goes on below as well: tools/reveal/deck.js cuts it when the deck is opened, as only the browser
knows how tall things are. Folded answers and the words for a figure go to the speaker's notes: press S. Esc shows all.
"""

import base64
import copy
import itertools
import re
import sys
from pathlib import Path

import nbformat
from math_core import LatexError, LatexToMathML
from nbconvert.exporters import SlidesExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
DECKS = {  # title -> the numbers of its notebooks
    "Why it works": ("00", "01", "02", "03"),
    "Doing it right": ("04", "05"),
    "Does it pay": ("06", "07", "09"),
    "Better drafts": ("08", "10", "11", "12"),
    "Beyond": ("13",),
    "Questions for the room": ("14",),
}
FIGURE_SCALE, FIGURE_WIDTH, FIGURE_HEIGHT = 1.3, 1180, 580  # larger than in a notebook, as far as a slide has room
FOLD = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
# Where a slide begins; fences and folds are stepped over.
START = re.compile(r"```.*?```|<details>.*?</details>|^(#{1,3} |\*\*\d+\.\*\* )", re.DOTALL | re.MULTILINE)


def equation(tex: str, display: bool) -> str:
    """An equation as MathML. ``ValueError`` for a command that the converter does not know."""
    try:
        return LatexToMathML(fancy_error=False).convert_with_local_state(tex, displaystyle=display)
    except LatexError as error:
        raise ValueError(f"the equation {tex.strip()!r} cannot be shown: {error}") from error


class Renderer(IPythonRenderer):
    """Markdown as nbconvert renders it, but equations as MathML, and no links to files that are not beside the deck."""

    def inline_math(self, body: str) -> str:
        return equation(body, display=False)

    def block_math(self, body: str) -> str:
        return equation(body, display=True)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, url, title) if url.startswith(("http", "#/")) else text


def to_html(source: str) -> str:
    return MarkdownWithMath(renderer=Renderer(escape=False, exclude_anchor_links=True)).render(source)


def read(path: Path) -> NotebookNode:
    """A notebook that was run. ``ValueError`` if it was not."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if any(cell.execution_count is None for cell in code):
        raise ValueError(f"{path.name} has no stored outputs: run `python tools/notebooks.py {path}` first")
    return notebook


def fold_to_notes(fold: re.Match) -> str:
    """A folded answer goes to the notes. An option of the quiz is shown, and why it is right or wrong goes there."""
    summary, answer = fold.groups()
    shown = f'<p class="option">{summary}</p>\n\n' if re.match(r"[A-D]\. ", summary) else ""
    return f'{shown}<aside class="notes">\n\n<p><b>{summary}</b></p>\n\n{answer.strip()}\n\n</aside>'


def markdown_cells(source: str) -> list[NotebookNode]:
    """A cell for each slide that begins in the text, and one for what comes before the first."""
    kinds = {0: "-"}  # where a slide begins -> its kind
    for found in START.finditer(source):
        if found[1]:
            kinds[found.start()] = "slide" if found[1] in ("# ", "## ") else "subslide"
    cells = []
    for (start, kind), end in zip(kinds.items(), [*list(kinds)[1:], len(source)], strict=True):
        text = FOLD.sub(fold_to_notes, source[start:end].strip())
        cells.append(new_markdown_cell(text, metadata={"slideshow": {"slide_type": kind}}))
    return cells


def prepare_output(output: NotebookNode) -> None:
    """Gives a figure its size on a slide, and takes the words for it to the notes."""
    data = output.get("data", {})
    if png := data.get("image/png"):
        header = base64.b64decode(png[:64])  # a PNG has its width in bytes 16 to 19, then its height
        width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
        scale = min(FIGURE_SCALE, FIGURE_WIDTH / width, FIGURE_HEIGHT / height)
        output.metadata.setdefault("image/png", {"alt": ""})
        output.metadata["image/png"].update(width=round(width * scale), height=round(height * scale))
    if "figure-text" in data.get("text/html", ""):
        data["text/html"] = f'<aside class="notes">{data["text/html"]}</aside>'


def kind_of(cell: NotebookNode) -> str:
    return cell.metadata.get("slideshow", {}).get("slide_type", "-")


def slides(notebook: NotebookNode) -> list[NotebookNode]:
    """Its cells, ready for nbconvert: without badges and set-up, each with the kind of slide that it begins."""
    cells: list[NotebookNode] = []
    for cell in copy.deepcopy(notebook.cells):
        if {"badges", "setup"} & set(cell.metadata.get("tags", [])):
            continue
        for output in cell.get("outputs", []):
            prepare_output(output)
        cells += markdown_cells(cell.source) if cell.cell_type == "markdown" else [cell]
    for before, after in itertools.pairwise(cells):
        if re.fullmatch("#+ .+", before.source) and kind_of(after) == "subslide":
            after.metadata.slideshow.slide_type = "-"  # no slide with a heading alone
    return cells


def deck(title: str, notebooks: list[NotebookNode]) -> str:
    """The page: a slide that lists the notebooks, then theirs."""
    parts = [slides(notebook) for notebook in notebooks]
    contents, number = [f"# {title}", ""], 1
    for part in parts:
        contents.append(f"- [{part[0].source.splitlines()[0].removeprefix('# ')}](#/{number})")
        number += sum(kind_of(cell) == "slide" for cell in part)
    cells = markdown_cells("\n".join(contents)) + [cell for part in parts for cell in part]
    metadata = {"title": title, "language_info": {"name": "python"}}
    folder = Path(__file__).parent / "reveal"
    inside = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    exporter = SlidesExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.raw_template = inside["deck.html.j2"]
    exporter.register_filter("markdown2html", to_html)
    page, _ = exporter.from_notebook_node(new_notebook(cells=cells, metadata=metadata), {"inside": inside})
    return page


def main(folder: Path = ROOT / "build" / "slides") -> int:
    try:
        found = {path.name[:2]: read(path) for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
        pages = {title: deck(title, [found[number] for number in numbers]) for title, numbers in DECKS.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for position, (title, page) in enumerate(pages.items(), start=1):
        path = folder / f"{position}_{title.lower().replace(' ', '_')}.html"
        path.write_text(page, encoding="utf-8", newline="\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
