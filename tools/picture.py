"""Draw the README's picture: one run of the tiny pair, round by round.

python tools/picture.py        writes docs/demo.png
"""

import sys
from pathlib import Path

from specdec_lite import GREEDY, load_pair, speculative
from specdec_lite.bench import PROMPTS
from specdec_lite.plots import rounds_figure

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    pair = load_pair("tiny")
    result = speculative(pair, PROMPTS["story"], K=4, max_new_tokens=48, sampling=GREEDY)
    figure = rounds_figure(result, pair.tokenizer, count=8)
    figure.suptitle("The prompt: Once upon a time there was a king ... the youngest was so beautiful that", fontsize=9)
    figure.savefig(ROOT / "docs" / "demo.png", dpi=160)
    return 0


if __name__ == "__main__":
    sys.exit(main())
