"""What a variant changes in a notebook: one line. All its numbers, and what its checks expect, come from there."""

STANDARD = "VARIANT = 0"  # the published numbers


def with_number(source: str, variant: int) -> str:
    """The source of a cell, for the class with this number."""
    return source.replace(STANDARD, f"VARIANT = {variant}")
