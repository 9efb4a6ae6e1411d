"""Figures draw what they are given, and text by origin loses nothing."""

import re

import pytest
from matplotlib import pyplot as plt

from specdec_lite import plots
from specdec_lite.record import Result, Round


class Letters:
    """Token i is the i-th letter; 26 is a sign that HTML must not swallow, 27 and 28 are the halves of an é."""

    pieces = [*(bytes([97 + i]) for i in range(26)), b"<b>", b"\xc3", b"\xa9"]  # noqa: RUF012

    def decode(self, tokens, **_):
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def make_result(*rounds):
    result = Result([0])
    for draft, tokens, origins in rounds:
        result.add(Round(draft, tokens, origins, 0.1, 0.1, 0.1))
    return result


RESULT = make_result(
    ((0, 1, 2), (0, 1, 2, 3), ("accepted",) * 3 + ("bonus",)),
    ((4, 5, 6), (4, 26), ("accepted", "recovered")),
    ((27, 28), (27, 28), ("accepted", "accepted")),
)


def test_marked_text_signs_each_origin_and_parts_the_rounds():
    assert plots.marked_text(RESULT, Letters()) == "abc+d+|e*<b>*|é"


def test_coloured_html_escapes_the_text_and_keeps_every_character():
    html = plots.coloured_html(RESULT, Letters())
    assert "<b>" not in html
    text = re.sub(r"<[^>]+>", "", html.split("</p>")[1])
    assert text.replace("&lt;", "<").replace("&gt;", ">") == "abc+d+|e*<b>*|é"


def test_the_rounds_figure_shows_every_token_of_every_round():
    fig = plots.rounds_figure(RESULT, Letters())
    shown = [text.get_text() for text in fig.axes[0].texts]
    assert shown[:4] == ["a", "b", "c", "+d+"]
    assert shown[4:8] == ["e", "~f~", "~g~", "*<b>*"]
    plt.close(fig)


def test_an_origin_never_rests_on_colour_alone():
    looks = plots.PALETTE.values()
    assert len({look.colour for look in looks}) == len(looks)
    assert len({(look.hatch, look.marker) for look in looks}) == len(looks)


def test_a_figure_is_shown_with_its_text(capsys):
    fig, _ = plots.figure()
    with pytest.raises(TypeError):
        plots.show(fig)
    plots.show(fig, alt="a line that rises")
    assert not plt.fignum_exists(fig.number)


def test_a_measured_table_is_marked_line_by_line(capsys):
    plots.table([(1, "2 ms")], header=("n", "time"), measured=True)
    plots.table([(10, "x")], header=("n", "y"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("timing: ") for line in lines] == [True, True, False, False]
