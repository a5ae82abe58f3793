"""Normalization and F1 of answer texts, by the rules of the official scripts of SQuAD, CMRC 2018 and KorQuAD 1.0.

| | squad | cmrc | korquad |
| --- | --- | --- | --- |
| removed | ASCII punctuation, the words a, an and the | `_CMRC_REMOVED` | ASCII punctuation, `_KORQUAD_SPACES` |
| F1 counts | words | Chinese characters, other words | characters |
| in common | a multiset | the longest run of both | a multiset |

Sources: evaluate-v1.1.py and evaluate-v2.0.py (Rajpurkar et al. 2016, 2018); cmrc2018_evaluate.py of
github.com/ymcui/cmrc2018 (Cui et al. 2019); evaluate-v1.0.py of korquad.github.io (Lim et al. 2019).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

_CMRC_REMOVED = dict.fromkeys(map(ord, "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"))  # noqa: RUF001
_CHINESE = re.compile("([\u4e00-\u9fa5])")
# CMRC's script splits what is not Chinese with NLTK, by the conventions of the Penn Treebank.
_STANDS_ALONE = re.compile("\\.{2,}|[;@#$%&?!()\\[\\]{}<>«»‘„\"\u2012-\u2015]|,(?!\\d)|(?<!\\w)'(?=\\w)")  # noqa: RUF001
_FINAL_PERIOD = re.compile(r"(?<=[^.\s])\.(?=[\])}>\"'»\s]*$)")
_CLITIC = re.compile(r"(?:'s|'m|'d|'ll|'re|'ve|n't|')(?!\S)")

_KORQUAD_SPACES = dict.fromkeys(map(ord, "'\"《》<>〈〉()‘’"), " ")  # noqa: RUF001


@dataclass(frozen=True)
class AnswerRules:
    """The rules of one official script.

    Exact match compares `normalise(text)`. F1 compares the units of normalized texts, and `num_common` counts those
    that two texts share.
    """

    normalise: Callable[[str], str]
    units: Callable[[str], list[str]]
    num_common: Callable[[Sequence[str], Sequence[str]], int]

    def f1(self, gold: str, prediction: str) -> float:
        """Harmonic mean of precision and recall over the units of two normalized texts; 0 if they share none."""
        gold_units, predicted_units = self.units(gold), self.units(prediction)
        num_same = self.num_common(gold_units, predicted_units)
        if not num_same:
            return 0.0
        precision, recall = num_same / len(predicted_units), num_same / len(gold_units)
        return 2 * precision * recall / (precision + recall)


def normalise(text: str) -> str:
    """SQuAD: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _normalise_cmrc(text: str) -> str:
    return text.lower().strip().translate(_CMRC_REMOVED)


def _normalise_korquad(text: str) -> str:
    return " ".join(text.translate(_KORQUAD_SPACES).lower().translate(_PUNCTUATION).split())


def _chinese_units(text: str) -> list[str]:
    """Each Chinese character, and the words between them."""
    return [unit for part in _CHINESE.split(text) for unit in _words(part)]


def _words(text: str) -> list[str]:
    text = _FINAL_PERIOD.sub(" . ", text)
    text = _STANDS_ALONE.sub(r" \g<0> ", text)
    return _CLITIC.sub(r" \g<0>", text).split()


def _characters(text: str) -> list[str]:
    return list(text.replace(" ", ""))


def _num_in_both(first: Sequence[str], second: Sequence[str]) -> int:
    return sum((Counter(first) & Counter(second)).values())


def _longest_run(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest run of units that both have."""
    return SequenceMatcher(None, first, second, autojunk=False).find_longest_match().size


ANSWER_RULES = {
    "squad": AnswerRules(normalise, str.split, _num_in_both),
    "cmrc": AnswerRules(_normalise_cmrc, _chinese_units, _longest_run),
    "korquad": AnswerRules(_normalise_korquad, _characters, _num_in_both),
}
