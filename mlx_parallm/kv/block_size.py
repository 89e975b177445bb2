"""How many tokens a block of the prefix cache has: decided here, and read from the prefix cache."""


def tokens_per_block(asked: int, context_length: int) -> int:
    """`asked`: --block-size. A block longer than the context would never be full, and only full ones go to SSD."""
    return min(asked, context_length)
