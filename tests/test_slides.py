"""The decks: every notebook once, nothing fetched, answers only in the notes, and every page fits."""

import base64
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import slides

ROOT = Path(__file__).resolve().parent.parent
BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
TEXT = r"""## Two laws

A law, $p$, and what is left of it: see [notebook 02](02_two_token_exactness.ipynb).

$$r(x) = \frac{\max(0, p(x) - q(x))}{2}$$

```python
# no heading, and no $equation$
```

**Predict.** How much?

<details><summary>Answer</summary>

**1.** Half of it is the secret.

</details>

### Further down

**7.** Which one?

<details><summary>A. The first</summary>

**No.** That would be a secret too.

</details>"""


def png(width, height):
    """The beginning of a picture, which holds its size."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size).decode()


def small_notebook():
    """What a notebook of the course has, once each."""
    shown = new_output("display_data", {"image/png": png(400, 200)}, metadata={"image/png": {"alt": 'a "flat" line'}})
    words = new_output("display_data", {"text/html": '<p class="figure-text">In words: flat</p>'})
    badge = "[![Open](https://example.org/badge.svg)](https://example.org)"
    outputs = [new_output("stream", text="the printed line"), shown, words]
    cells = [
        new_markdown_cell("# Title\n\nAn opening."),
        new_markdown_cell(badge, metadata={"tags": ["badges"]}),
        new_code_cell("import the_set_up", execution_count=1, metadata={"tags": ["setup"]}),
        new_markdown_cell(TEXT),
        new_code_cell("print(1 < 2)", execution_count=2, outputs=outputs),
    ]
    return new_notebook(cells=cells)


@pytest.fixture(scope="module")
def page():
    return BeautifulSoup(slides.deck("A deck", [small_notebook(), small_notebook()]), "html.parser")


@pytest.fixture(scope="module")
def real_page():
    (path,) = ROOT.glob("notebooks/13_*.ipynb")
    return BeautifulSoup(slides.deck("Beyond", [slides.read(path)]), "html.parser")


def on_slides(page):
    """The text that the audience sees."""
    seen = BeautifulSoup(str(page.select_one(".slides")), "html.parser")
    for each in seen.select("aside"):
        each.decompose()
    return seen.get_text()


def in_notes(page):
    return " ".join(each.get_text() for each in page.select("aside.notes"))


def test_every_notebook_belongs_to_exactly_one_deck():
    numbers = [path.name[:2] for path in ROOT.glob("notebooks/*.ipynb")]
    assert Counter(number for deck in slides.DECKS.values() for number in deck) == Counter(numbers)


@pytest.mark.parametrize("name", ["page", "real_page"])
def test_a_deck_fetches_nothing(name, request):
    deck = request.getfixturevalue(name)
    assert not deck.select("link, iframe, object, script[src]")
    assert {image["src"].split(",")[0] for image in deck.select("[src]")} == {"data:image/png;base64"}
    for style in deck.select("style"):
        assert not re.search(r"@import|url\((?!data:)", style.string)


def test_every_figure_keeps_its_alt_text(page, real_page):
    assert [image["alt"] for image in page.select("img")] == ['a "flat" line'] * 2
    assert len(real_page.select("img")) > 2
    assert all(len(image["alt"]) > 20 for image in real_page.select("img"))


SIZES = {(400, 200): (520, 260), (2360, 100): (1180, 50), (100, 1160): (50, 580)}


@pytest.mark.parametrize("size", SIZES, ids=["small", "wide", "tall"])
def test_a_figure_is_enlarged_as_far_as_the_slide_has_room(size):
    output = new_output("display_data", {"image/png": png(*size)})
    slides.prepare_output(output)
    figure = output.metadata["image/png"]
    assert (figure["width"], figure["height"]) == SIZES[size]


def test_answers_and_the_words_for_figures_are_in_the_notes_only(page):
    assert "secret" not in on_slides(page)
    assert "In words" not in on_slides(page)
    for noted in ("Half of it is the secret", "a secret too", "In words: flat"):
        assert noted in in_notes(page)


def test_no_fold_is_left_in_a_real_deck(real_page):
    (path,) = ROOT.glob("notebooks/13_*.ipynb")
    folds = [fold for cell in nbformat.read(path, 4).cells for fold in slides.FOLD.findall(cell.source)]
    assert len(folds) > 5
    assert not real_page.select("details, summary")
    assert len(real_page.select("aside.notes > p:first-child > b:only-child")) >= len(folds)


def test_what_is_shown_is_shown_and_badges_and_set_up_are_not(page):
    seen = on_slides(page)
    for shown in (
        "An opening.",
        "print(1 < 2)",
        "the printed line",
        "A. The first",
        "see notebook 02.",
        "# no heading",
    ):
        assert shown in seen
    assert "badge" not in str(page.select_one(".slides"))
    assert "the_set_up" not in seen


def test_no_link_leads_to_a_file_that_is_not_there(page, real_page):
    links = [link["href"] for link in [*page.select("a[href]"), *real_page.select("a[href]")]]
    assert links and all(link.startswith(("https://", "#/")) for link in links)


def test_equations_are_mathml_and_code_is_left_alone(page):
    fraction = page.select_one(".slides math mfrac")
    assert "max" in fraction.get_text()
    assert page.find("math", display="block")
    assert "$" not in on_slides(page).replace("no $equation$", "")


def test_headings_begin_slides_and_the_list_of_contents_leads_to_them(page):
    stacks = page.select(".slides > section")
    leaves = [stack.select(":scope > section") for stack in stacks]
    first = [[leaf.find(re.compile("h[1-3]")).get_text() for leaf in each] for each in leaves]
    # Question 7 follows a bare heading, so it shares its slide.
    assert first == [["A deck"], ["Title"], ["Two laws", "Further down"], ["Title"], ["Two laws", "Further down"]]
    links = [link["href"] for link in stacks[0].select("a")]
    assert [stacks[int(link.removeprefix("#/"))].h1.get_text() for link in links] == ["Title", "Title"]


def test_a_numbered_question_begins_a_slide_unless_it_stands_in_a_fold():
    fold = "<details><summary>Answer</summary>\n\n**9.** No.\n\n</details>"
    cells = slides.markdown_cells(f"**1.** One?\n\n{fold}\n\n**2.** Two?")
    assert [slides.kind_of(cell) for cell in cells] == ["subslide", "subslide"]


def test_a_notebook_that_was_not_run_is_an_error_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks").mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "notebooks" / "00_new.ipynb")
    monkeypatch.setattr(slides, "ROOT", tmp_path)
    assert slides.main(tmp_path / "out") == 1
    assert "00_new.ipynb has no stored outputs: run `python tools/notebooks.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_equation_that_cannot_be_shown_is_named():
    with pytest.raises(ValueError, match=r"the equation '\\\\nothing x' cannot be shown: .*Unknown command"):
        slides.to_html(r"Here is $\nothing x$.")


MEASURE = """<script>
for (const each of document.querySelectorAll(".slides > section > section")) {
  each.parentElement.style.display = each.style.display = "block";
  each.title = each.offsetHeight;
}
</script></body>"""


def opened(page, folder):
    """The pages as a browser has cut them, each with its height in pixels as its title."""
    path = folder / "deck.html"
    path.write_text(page.replace("</body>", MEASURE), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,720"]
    environment = {**os.environ, "HOME": str(folder)}
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    run = subprocess.run(command, capture_output=True, timeout=120, check=True, env=environment)
    return BeautifulSoup(run.stdout.decode("utf-8"), "html.parser").select(".slides > section > section")


@pytest.mark.skipif(BROWSER is None, reason="a browser cuts the pages, and none was found")
def test_what_is_too_tall_is_cut_into_pages_that_fit_and_nothing_is_lost(tmp_path):
    def numbered(name, count):
        return [f"{name}{number}" for number in range(count)]

    text = "\n\n".join(f"{word} " + "and on " * 60 for word in numbered("word", 12))
    table = "\n".join(["| a | b |", "|---|---|", *(f"| {row} | x |" for row in numbered("row", 40))])
    items = "\n".join(f"{i}. {item}" for i, item in enumerate(numbered("item", 40), start=1))
    code = [new_code_cell(f"code{i}" + "\npass" * 14, execution_count=1) for i in range(4)]
    printed = new_output("stream", text="\n".join(numbered("line", 90)))
    cells = [
        new_markdown_cell(f"# Long\n\n{text}\n\n## Table\n\nAs follows:\n\n{table}\n\n## List\n\n{items}"),
        *code,
        new_code_cell("print()", execution_count=1, outputs=[printed]),
    ]
    pages = opened(slides.deck("A deck", [new_notebook(cells=cells)]), tmp_path)
    assert all(0 < int(each["title"]) <= 720 for each in pages)
    words = Counter(re.findall(r"[a-z]+\d+", " ".join(each.get_text(" ") for each in pages)))
    counts = {"word": 12, "row": 40, "item": 40, "code": 4, "line": 90}
    assert words == {word: 1 for name, count in counts.items() for word in numbered(name, count)}
    assert "As follows" in next(each for each in pages if "row0" in each.get_text()).get_text()
    first, second = [each.ol for each in pages if each.ol][:2]
    assert int(second["start"]) == 1 + len(first.select("li"))
