"""Between text and tokens: prompts, stop strings, and text that arrives token by token."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a whole character yet


def encode_prompt(tokenizer: Any, prompt: str | Sequence[int], vocab_size: int) -> list[int]:
    """Token ids of a prompt, which may be ids already. Raises ``ValueError`` when it is empty or has unknown ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this pair has no tokenizer: give the prompt as token ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError("the prompt is empty: a model needs at least one token to go on from")
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(f"the prompt has token id {unknown[0]}, but the vocabulary has ids 0 to {vocab_size - 1}")
    return ids


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_condition(
    tokenizer: Any, eos_token_id: int | Sequence[int] | None, stop_strings: str | Sequence[str] | None
) -> Callable[[list[int]], bool]:
    """Whether an output ends with its last token: an end-of-sequence id, or the token that completes a stop string."""
    eos_ids = {eos_token_id} if isinstance(eos_token_id, int | Integral) else set(eos_token_id or ())
    if not all(isinstance(token, Integral) for token in eos_ids):
        raise ValueError(f"eos_token_id is {eos_token_id!r}; it must be a token id, or a list of them")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if strings and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer, and this pair has none")
    if "" in strings:
        raise ValueError("an empty stop string would stop before the first token")
    # A token holds at least a byte of text, so a stop string lies within its own length in tokens (and some to spare,
    # for special tokens that show no text).
    reach = max((len(string.encode("utf-8")) for string in strings), default=0) + 8

    def ends(tokens: list[int]) -> bool:
        if tokens[-1] in eos_ids:
            return True
        if not strings:
            return False
        tail = decode_text(tokenizer, tokens[-reach:])
        return any(string in tail for string in strings)

    return ends


class TextStream:
    """Text piece by piece: each token's text once, in order, never half a character."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0  # tokens whose text has been given out

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """The text that became complete with ``tokens``; what is unfinished waits, unless this is the end."""
        self.tokens.extend(tokens)
        # Decoded with a few tokens before it, because a tokenizer may treat the start of a text in its own way.
        start = max(0, self.shown - 4)
        before = decode_text(self.tokenizer, self.tokens[start : self.shown])
        text = decode_text(self.tokenizer, self.tokens[start:])
        if text.endswith(UNFINISHED) and not final:
            return ""
        self.shown = len(self.tokens)
        return text[len(before) :]
