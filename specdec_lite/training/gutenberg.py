"""Rebuilding the corpus from Project Gutenberg, one polite download at a time.

The rebuilt text is close to the corpus that the embedded pair was trained on, but not byte-identical to it: Project
Gutenberg corrects and reformats its books, and the cleaning here is a plain restatement of the original's; in
particular it sees more chapter headings, so that the stories are more and shorter.

Headers, licence text, contents, transcribers' notes, illustration captions, headings and paragraphs of 60 characters or
fewer are dropped. What is left is ASCII, a paragraph a line, with a line ``<|endoftext|>`` where a book, story or
chapter begins.
"""

import re
import time
import unicodedata
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm.auto import tqdm

from .corpus import END_OF_TEXT

MIRROR = "https://www.gutenberg.org"
USER_AGENT = "specdec-lite corpus builder (35 books, once)"
TRIES = 3
SHORT = 60  # characters; a paragraph has more, a heading at most so many

BOOKS = {
    11: "Alice's Adventures in Wonderland", 12: "Through the Looking-Glass", 1597: "Andersen's Fairy Tales",
    225: "At the Back of the North Wind", 708: "The Princess and the Goblin", 7885: "Celtic Fairy Tales",
    7439: "English Fairy Tales", 14241: "More English Fairy Tales", 7128: "Indian Fairy Tales",
    4018: "Japanese Fairy Tales", 55: "The Wonderful Wizard of Oz", 54: "The Marvelous Land of Oz", 486: "Ozma of Oz",
    420: "Dorothy and the Wizard in Oz", 485: "The Road to Oz", 778: "Five Children and It",
    2591: "Grimms' Fairy Tales", 5314: "Household Tales by Brothers Grimm", 500: "The Adventures of Pinocchio",
    128: "The Arabian Nights Entertainments", 503: "The Blue Fairy Book", 3282: "The Brown Fairy Book",
    2435: "The Crimson Fairy Book", 7277: "The Green Fairy Book", 6746: "The Grey Fairy Book",
    3454: "The Lilac Fairy Book", 27826: "The Olive Fairy Book", 3027: "The Orange Fairy Book",
    5615: "The Pink Fairy Book", 540: "The Red Fairy Book", 641: "The Violet Fairy Book",
    640: "The Yellow Fairy Book", 236: "The Jungle Book", 113: "The Secret Garden", 289: "The Wind in the Willows",
}  # fmt: skip

START = re.compile(r"\*\*\* ?START OF [^*]*\*\*\*")
END = re.compile(r"\*\*\* ?END OF ")
CAPTION = re.compile(r"\[(illustration|transcriber)[^]]*\]", re.IGNORECASE)
NOTE = re.compile(r"(produced by|e-?text prepared|transcribed|transcriber|end of (the )?project)", re.IGNORECASE)
CONTENTS = re.compile(r"(table of )?contents\b", re.IGNORECASE)
CHAPTER = re.compile(r"chapter\s+\S+", re.IGNORECASE)
TO_ASCII = str.maketrans({
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{EM DASH}": "--", "\N{EN DASH}": "-", "\N{FRACTION SLASH}": "/", "_": None,  # _italics_
    "\N{LATIN SMALL LETTER AE}": "ae", "\N{LATIN CAPITAL LETTER AE}": "Ae",
    "\N{LATIN SMALL LIGATURE OE}": "oe", "\N{LATIN CAPITAL LIGATURE OE}": "Oe",
})  # fmt: skip


def fold(text: str) -> str:
    """ASCII only: quotation marks, dashes, ligatures and accents become their nearest plain form."""
    return unicodedata.normalize("NFKD", text.translate(TO_ASCII)).encode("ascii", "ignore").decode("ascii")


def is_heading(paragraph: str) -> bool:
    """A short line all in capitals, or one that begins with the word "chapter"."""
    if len(paragraph) <= SHORT and paragraph.isupper():
        return paragraph[0].isalnum()  # a quotation mark would make it an exclamation
    return len(paragraph) <= 100 and CHAPTER.match(paragraph) is not None


def clean(book: str) -> Iterator[str]:
    """The lines that a book gives: its paragraphs, and the marker before the first of each story or chapter."""
    body = END.split(START.split(book, 1)[1], 1)[0]
    story_begins, in_contents = True, False
    for block in re.split(r"\r?\n\s*\n", CAPTION.sub("", fold(body))):
        paragraph = " ".join(block.split())
        full_line = any(len(line.strip()) > SHORT for line in block.splitlines())
        in_contents = bool(CONTENTS.match(paragraph)) or (in_contents and not full_line)
        if is_heading(paragraph):
            story_begins = True
        elif len(paragraph) > SHORT and not in_contents and not NOTE.match(paragraph):
            if story_begins:
                yield END_OF_TEXT
            story_begins = False
            yield paragraph


def address(number: int, mirror: str) -> str:
    return f"{mirror.rstrip('/')}/cache/epub/{number}/pg{number}.txt"


def fetch(url: str, pause: float) -> str:
    """The text at ``url``, asked for ``TRIES`` times unless the answer is a plain no; an ``OSError`` says why not."""
    for attempt in range(TRIES):
        time.sleep(pause * 2**attempt)
        try:
            with urlopen(Request(url, headers={"User-Agent": USER_AGENT}), timeout=60) as answer:
                return answer.read().decode("utf-8-sig", errors="replace")
        except (OSError, HTTPException) as error:
            failure = error
            if isinstance(error, HTTPError) and error.code < 500 and error.code != 429:
                break
    raise OSError(f"{url}: {failure}") from failure


def download(number: int, folder: Path, mirror: str, pause: float) -> Path:
    """The file of a book in ``folder``, fetched only if it is not there yet and kept only if it is whole."""
    path = folder / f"pg{number}.txt"
    if path.exists():
        return path
    book = fetch(address(number, mirror), pause)
    if not (START.search(book) and END.search(book)):
        raise OSError(f"{address(number, mirror)}: not a whole book (its START or END marker is missing)")
    partial = path.with_suffix(".partial")
    partial.write_text(book, encoding="utf-8", newline="")
    return partial.replace(path)


def build(
    out: Path, *, books: Iterable[int] = BOOKS, mirror: str = MIRROR, folder: Path | None = None, pause: float = 2.0
) -> None:
    """Write the corpus to ``out``; the books as downloaded stay in ``folder`` (default: ``gutenberg`` beside ``out``).

    pause: seconds before each request. Raises ``OSError`` naming the number and address of every book that could not be
    had; the others are on disk by then, so that a second call asks for the missing ones only.
    """
    folder = folder or out.parent / "gutenberg"
    folder.mkdir(parents=True, exist_ok=True)
    paths, missing = [], []
    for number in tqdm(list(books), desc="books", unit="book"):
        try:
            paths.append(download(number, folder, mirror, pause))
        except OSError as error:
            missing.append(f"book {number} from {error}")
            if not isinstance(error.__cause__, HTTPError | None):
                break  # no connection: the next book would fare no better
    if missing:
        raise OSError(f"{'; '.join(missing)}. {folder} keeps the books that came: run the same command again")
    lines = (line for path in paths for line in clean(path.read_text(encoding="utf-8")))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
