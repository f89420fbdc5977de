"""Token counts as people write them: 8192, "128K", "5M", "1G".

The suffixes are binary, because sequence lengths are: 1K = 1024, so "128K" is 131072 tokens.
"""

import re
from typing import Annotated

TOKENS = object()
"""The mark by which the loader knows a token count from any other integer."""

TokenCount = Annotated[int, TOKENS]

_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WRITTEN = re.compile(r"([0-9]+(?:_[0-9]+)*)\s*([KMG]?)", re.IGNORECASE)


def parse_token_count(text: str) -> int:
    """Tokens in `text`: digits, then at most one of K, M, G (either case).

    Raises ValueError if it is written in any other way ("0.5M" and "5MB" are refused).
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        raise ValueError('expected a whole number of tokens, such as 8192, "128K" or "5M"')
    digits, unit = match.groups()
    return int(digits) * _UNIT[unit.upper()]
