"""From a text file to batches of tokens.

The corpus is one text file, a paragraph a line; a line ``<|endoftext|>`` begins each story. Every 30th story is kept
for validation. In the token stream that marker becomes the token of the same name, so a model trained on it learns
where stories end.
"""

from pathlib import Path

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VALIDATE_EVERY = 30


def read_stories(path: Path) -> list[str]:
    """The stories of a corpus file, in order, without their markers.

    Raises ``FileNotFoundError`` when there is no such file, ``ValueError`` when it has too few stories to validate on.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no corpus at {path}: give --corpus PATH, or rebuild it (see docs/model-card.md)")
    stories = [story.strip("\n") for story in path.read_text(encoding="utf-8").split(END_OF_TEXT)]
    stories = [story for story in stories if story]
    if len(stories) < VALIDATE_EVERY:
        raise ValueError(
            f"{path} holds {len(stories)} stories; at least {VALIDATE_EVERY} are needed, each begun by {END_OF_TEXT}"
        )
    return stories


def split(stories: list[str]) -> tuple[list[str], list[str]]:
    """(training, validation): every 30th story is for validation."""
    validation = stories[VALIDATE_EVERY - 1 :: VALIDATE_EVERY]
    training = [story for i, story in enumerate(stories) if i % VALIDATE_EVERY != VALIDATE_EVERY - 1]
    return training, validation


def train_tokenizer(stories: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text can be encoded, and decoding gives it back byte for byte."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(stories, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def token_stream(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> Int[Tensor, " tokens"]:
    """All stories as one row of token ids, each begun by the end-of-text token."""
    ids: list[int] = []
    for story in stories:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer.encode(story))
    return torch.tensor(ids)


def random_windows(
    stream: Int[Tensor, " tokens"], *, rows: int, length: int, seed: int, step: int
) -> Int[Tensor, "rows length"]:
    """The batch of training step ``step``: windows at random places, a function of (seed, step) and nothing else.

    Because no generator is carried from step to step, a run that is resumed sees the batches that it would have seen.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - length, (rows,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def consecutive_windows(stream: Int[Tensor, " tokens"], *, length: int) -> Int[Tensor, "rows length"]:
    """The stream cut into windows one after the other (the last, shorter one is dropped)."""
    rows = len(stream) // length
    return stream[: rows * length].view(rows, length)


def spread_windows(stream: Int[Tensor, " tokens"], *, length: int, count: int) -> Int[Tensor, "rows length"]:
    """At most ``count`` windows of a corpus, evenly spread over it. Raises ``ValueError`` when it has not even one."""
    windows = consecutive_windows(stream, length=length)
    if not len(windows):
        raise ValueError(f"{len(stream)} tokens are no window of {length}: give a larger corpus (both its parts count)")
    return windows[:: max(1, len(windows) // count)][:count]
