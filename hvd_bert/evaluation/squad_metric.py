"""Computes exact match and F1 as the official SQuAD scripts for v1.1 and v2.0 do, and by rules for other languages.

Both scripts compare normalized texts and take the best value over a question's gold answers. They differ for texts
that have no words after normalization:
- v1.1: for two texts without words, F1 is 0 but exact match is 1, so F1 can be below exact match.
- v2.0: F1 is 1 if both texts have no words, 0 if only one of them has no words. Gold answers without words are ignored.
  If no gold answer remains, only a prediction without words is right.

Sources: evaluate-v1.1.py (Rajpurkar et al. 2016) and evaluate-v2.0.py (Rajpurkar et al. 2018). The tests compare
this module with these scripts. Of the other languages, all but ja, th and other have the rules of
mlqa_evaluation_v1.py (Lewis et al. 2020).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvd_bert.config.data import SQUAD_RULES
from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError


class _UnicodePunctuation(dict[int, int | None]):
    """A table for `str.translate` that removes ASCII and Unicode punctuation; filled as characters occur."""

    def __missing__(self, code: int) -> int | None:
        removed = unicodedata.category(chr(code)).startswith("P") or chr(code) in string.punctuation
        self[code] = None if removed else code
        return self[code]


class Language(NamedTuple):
    """Rules by which answers are normalized.

    Attributes:
        articles: Pattern of texts that are replaced by a space.
        characters: Pattern of texts that are words of their own, in languages without spaces.
        punctuation: Table of removed characters.
    """

    articles: re.Pattern[str] | None = None
    characters: re.Pattern[str] | None = None
    punctuation: Mapping[int, int | None] = _UnicodePunctuation()


def _words(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{words.replace(' ', '|')})\b")


# Kana and Han characters, each with its voicing marks; Thai characters, each with its vowel signs and tone marks.
_KANA, _HAN = "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f", "\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_JAPANESE = re.compile(f"[{_KANA}{_HAN}][\u3099\u309a\uff9e\uff9f]*")
_THAI = re.compile("[\u0e00-\u0e7f][\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*")
LANGUAGES = {  # value of --answer_language -> rules
    SQUAD_RULES: Language(_words("a an the"), punctuation=dict.fromkeys(map(ord, string.punctuation))),
    "en": Language(_words("a an the")),
    "ar": Language(re.compile("ال")),  # anywhere in a word, as in MLQA's script
    "de": Language(_words("ein eine einen einem eines einer der die das den dem des")),
    "es": Language(_words("un una unos unas el la los las")),
    "hi": Language(),
    "vi": Language(_words("của là cái chiếc những")),
    "zh": Language(characters=re.compile("[\u4e00-\u9fa5]")),
    "ja": Language(characters=_JAPANESE),
    "th": Language(characters=_THAI),
    "other": Language(),
}


def normalize(text: str, answer_language: str = SQUAD_RULES) -> str:
    """Lower-case a text, and remove punctuation, articles and repeated spaces, by an entry of `LANGUAGES`."""
    if answer_language not in LANGUAGES:
        raise UserError(f"answer_language {answer_language!r} is unknown: choose from {', '.join(LANGUAGES)}.")
    articles, _, punctuation = LANGUAGES[answer_language]
    text = text.lower().translate(punctuation)
    if articles:
        text = articles.sub(" ", text)
    return " ".join(split(text, answer_language))


def split(text: str, answer_language: str) -> list[str]:
    """Split a text into words at spaces and, in languages without spaces, at each character."""
    characters = LANGUAGES[answer_language].characters
    return (characters.sub(r" \g<0> ", text) if characters else text).split()


def _f1(gold: str, prediction: str) -> float:
    """Compute F1 over the words of two normalized texts; 0 if they share no words."""
    gold_words, predicted_words = gold.split(), prediction.split()
    num_same = sum((Counter(gold_words) & Counter(predicted_words)).values())
    if not num_same:
        return 0.0
    precision, recall = num_same / len(predicted_words), num_same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def score(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    version_2_with_negative: bool = False,
    null_score_diff_threshold: float = 0.0,
    answer_language: str = SQUAD_RULES,
) -> dict[str, float]:
    """Compute the official metrics in percent, by the rules of `answer_language`, a key of `LANGUAGES`.

    `predictions`: question id -> text. `null_odds`: question id -> odds.

    v1.1: exact_match, f1, total (the number of questions).

    v2.0: also HasAns_exact, HasAns_f1 and HasAns_total for answerable questions, and NoAns_exact, NoAns_f1 and
    NoAns_total for unanswerable questions, if there are such questions. `exact_match` is evaluate-v2.0.py's `exact`.

    With `null_odds`, which replace that script's probability of "no answer" (--na-prob-file), also best_exact,
    best_exact_thresh, best_f1 and best_f1_thresh: the best values over all thresholds on the odds, and the thresholds
    that give them. Questions with odds above `null_score_diff_threshold` (--na-prob-thresh) count as answered with "".

    For exact best thresholds, predict `Answer.best_span` for every question: no threshold can restore the text of a
    prediction "". The other metrics do not change.

    Every question needs a prediction, with `null_odds` also odds, and for v1.1 at least one gold answer. Entries for
    other ids are ignored. Equal odds are processed in the order of `questions`.
    """
    rules = version_2_with_negative, answer_language
    exact, f1 = zip(*(question_scores(q, predictions[q.id], *rules) for q in questions), strict=True)
    if not version_2_with_negative:
        return _means(exact, f1)
    has_answer = [bool(q.answer_texts) for q in questions]
    if null_odds is None:
        return _means_v2(exact, f1, has_answer)
    odds = [null_odds[q.id] for q in questions]
    nulled = [
        [
            float(not has) if odd > null_score_diff_threshold else value
            for value, odd, has in zip(values, odds, has_answer, strict=True)
        ]
        for values in (exact, f1)
    ]
    result = _means_v2(nulled[0], nulled[1], has_answer)
    empty = [not predictions[q.id] for q in questions]
    for name, values in (("exact", exact), ("f1", f1)):
        best, best_threshold = _best_threshold(values, odds, has_answer, empty)
        result |= {f"best_{name}": best, f"best_{name}_thresh": best_threshold}
    return result


def question_scores(
    question: Question, prediction: str, version_2_with_negative: bool, answer_language: str
) -> tuple[float, float]:
    """Compute exact match and F1 of one prediction, from 0 to 1."""
    prediction = normalize(prediction, answer_language)
    golds = [normalize(text, answer_language) for text in question.answer_texts]
    if version_2_with_negative:
        golds = [gold for gold in golds if gold] or [""]
    exact = float(prediction in golds)
    without_words = version_2_with_negative and not prediction
    return exact, exact if without_words else max(_f1(gold, prediction) for gold in golds)


def _means(exact: Sequence[float], f1: Sequence[float]) -> dict[str, float]:
    total = len(exact)
    return {"exact_match": 100.0 * sum(exact) / total, "f1": 100.0 * sum(f1) / total, "total": total}


def _means_v2(exact: Sequence[float], f1: Sequence[float], has_answer: Sequence[bool]) -> dict[str, float]:
    result = _means(exact, f1)
    for prefix, answerable in (("HasAns", True), ("NoAns", False)):
        members = [i for i, has in enumerate(has_answer) if has is answerable]
        if members:
            result[f"{prefix}_exact"] = 100.0 * sum(exact[i] for i in members) / len(members)
            result[f"{prefix}_f1"] = 100.0 * sum(f1[i] for i in members) / len(members)
            result[f"{prefix}_total"] = len(members)
    return result


def _best_threshold(
    scores: Sequence[float], odds: Sequence[float], has_answer: Sequence[bool], empty: Sequence[bool]
) -> tuple[float, float]:
    """Find the highest mean score in percent over all thresholds, and its threshold.

    As in the official script, every question first counts as answered with "", at threshold 0.0. Then predictions are
    added one by one, in the order of rising odds: an answerable question gains its score, and an unanswerable question
    loses its point if its prediction is not "".
    """
    current = best = float(has_answer.count(False))
    best_threshold = 0.0
    for i in sorted(range(len(odds)), key=odds.__getitem__):
        current += scores[i] if has_answer[i] else (0.0 if empty[i] else -1.0)
        if current > best:
            best, best_threshold = current, odds[i]
    return 100.0 * best / len(scores), best_threshold
