"""The sample's word pieces: whole words, composed names in two pieces, and letters for any other text."""

from __future__ import annotations

import re
import string

from hvd_bert.sample import themes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Non-ASCII characters of English text, which would otherwise become [UNK].
EXTRA_CHARACTERS = "–—‘’“”…£€°ßæøœ"  # noqa: RUF001
_WORD = re.compile(r"[a-z]+|[^a-z\s]")


def plain_words() -> list[str]:
    """Every word of the themes' sentences and lists, lower case, sorted; composed names are not among them."""
    words: set[str] = set()
    for text in themes.all_text():
        words.update(_WORD.findall(re.sub(r"\{.\}", " ", text.lower())))
    return sorted(words)


def split_word(word: str, pieces: frozenset[str]) -> list[str]:
    """Split a word by WordPiece's rule, longest piece first; empty if a character is unknown."""
    out: list[str] = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in pieces:
                out.append(piece)
                start = end
                break
        else:
            return []
    return out


def vocabulary() -> list[str]:
    """All pieces in the order of their ids."""
    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation, *EXTRA_CHARACTERS]
    pairs = [f"{n:02d}" for n in range(100)]
    pieces = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *pairs, *(f"##{p}" for p in pairs)]
    for starts, ends in themes.COMPOSED:
        pieces += [*starts, *(f"##{end}" for end in ends)]
    pieces += plain_words()
    return list(dict.fromkeys(pieces))
