"""Counts of a file's questions and windows, and all warnings about the data, which follow from these counts."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from hvd_bert.config.data import BY_CHARACTER, SQUAD_RULES
from hvd_bert.data.sources.squad import Findings, Question
from hvd_bert.errors import log

# Shares of a file above which it warns. SQuAD with BERT's vocabulary has 0.02 % of unknown text.
UNKNOWN_SHARE, UNSPACED_SHARE = 0.02, 0.05
# Words without spaces: Thai to Tibetan, Burmese, Khmer (which U+200B may separate), Kana and Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u200b\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]{5,}"
)
_COUNTER = re.compile(r"(line|row) \d+.*|.*\[\d+\]|\d{1,7}")  # the id of a question without one, or a counter
Keys = npt.NDArray[np.uint64]  # [questions, 2]


@dataclass(frozen=True)
class WindowCounts:
    """Statistics of a set of questions and their windows."""

    questions: int = 0
    windows: int = 0
    shortened_questions: int = 0  # truncated to leave room for the context
    crowded_questions: int = 0  # whose windows advance by at most a quarter of their context tokens
    crowded_windows: int = 0  # the windows of crowded questions
    answerable_questions: int = 0  # with a first answer whose position is known
    cut_answers: int = 0  # answers that no window contains completely
    tokenless_answers: int = 0  # answers whose characters the tokenizer drops
    unknown_questions: int = 0  # questions, at least half of whose tokens the vocabulary lacks
    unknown_answers: int = 0  # answers of tokens that the vocabulary lacks
    several_answers: int = 0  # questions with different answers at separate positions
    unspaced_contexts: int = 0  # questions whose context has hardly any spaces
    context_characters: int = 0  # in tokens; questions that share a context count it once
    unknown_characters: int = 0  # of these, in tokens that the vocabulary lacks
    answer_lengths: tuple[int, ...] = ()  # [n]: questions whose shortest answer has n tokens, [0]: without an answer

    def __add__(self, other: WindowCounts) -> WindowCounts:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        both = zip_longest(self.answer_lengths, other.answer_lengths, fillvalue=0)
        return WindowCounts(**sums | {"answer_lengths": tuple(map(sum, both))})

    @property
    def lost_answers(self) -> int:
        """Number of answers that are not completely inside any window."""
        return self.cut_answers + self.tokenless_answers

    @property
    def unknown_share(self) -> float:
        """Share of the contexts' characters that are in tokens which the vocabulary lacks."""
        # Not the share of tokens: a whole sentence may be one unknown token.
        return self.unknown_characters / max(1, self.context_characters)

    def longer_answers(self, limit: int) -> int:
        """Return the number of questions whose answers all have more than `limit` tokens."""
        return sum(self.answer_lengths[limit + 1 :])


@dataclass(frozen=True)
class FileCounts:
    """The counts of a file, and what is needed to judge them.

    `purpose`: "training", "validation" or "prediction". `answer_language`: rules of the metric. `shared`: number of
    questions that the training data have, too; None without training data.
    """

    name: str
    purpose: str
    windows: WindowCounts
    findings: Findings = field(default_factory=Findings)
    max_answer_length: int = 0
    answer_language: str = SQUAD_RULES
    shared: int | None = None

    def facts(self) -> dict[str, int | float]:
        """Return the counts for train_results.json."""
        counts = self.windows
        found: dict[str, int | float] = {
            "questions": counts.questions,
            "windows": counts.windows,
            "truncated_questions": counts.shortened_questions,
            "crowded_questions": counts.crowded_questions,
            "crowded_windows": counts.crowded_windows,
            "answers": counts.answerable_questions,
            "lost_answers": counts.lost_answers,
            "unknown_questions": counts.unknown_questions,
            "unknown_answers": counts.unknown_answers,
            "unknown_share": round(counts.unknown_share, 6),
            "unspaced_contexts": counts.unspaced_contexts,
        }
        if self.purpose == "training":
            return found | {"several_answers": counts.several_answers}
        longer = counts.longer_answers(self.max_answer_length)
        shared = {} if self.shared is None else {"shared_questions": self.shared}
        return found | {"answers_above_max_length": longer} | shared

    def warn(self, told: set[str] | None = None) -> None:
        """Log the columns and the warnings, except kinds of warnings in `told`, to which the logged kinds are added."""
        if self.findings.columns:
            log.info("%s: columns %s.", self.name, self.findings.columns)
        told = set() if told is None else told
        for kind, message in self._warnings():
            if kind not in told:
                log.warning("%s: %s", self.name, message)
            told.add(kind)

    def _warnings(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each warning."""
        if self.findings.mistakes:
            yield "mistakes", _mistakes(self.findings)
        if self.findings.repaired:
            yield (
                "repaired",
                f"{self.findings.repaired} questions had answers with a wrong answer_start, which were moved to the"
                f" only occurrence of their text. The first: {'; '.join(self.findings.first_repaired)}",
            )
        yield from self._of_windows()
        if self.purpose == "training" and self.windows.several_answers:
            yield (
                "several answers",
                f"{self.windows.several_answers} of {self.windows.questions} questions have several different answers,"
                " of which training uses the first (to learn all of them, see docs/guides/examples.md, Several answers"
                " per question)",
            )
        if self.purpose == "validation":
            yield from self._of_validation()

    def _of_windows(self) -> Iterator[tuple[str, str]]:
        counts, questions = self.windows, f"of {self.windows.questions} questions"
        long = []
        if counts.shortened_questions:
            long.append(f"{counts.shortened_questions} {questions} were truncated to leave room for the context")
        if counts.crowded_questions:
            long.append(
                f"{counts.crowded_questions} {questions} leave so little room for the context that they have"
                f" {counts.crowded_windows} windows, which advance by at most a quarter of their context tokens"
            )
        if long:
            remedy = "shorten the questions, lower --doc_stride or raise --max_seq_length"
            yield "long questions", f"{'; '.join(long)} ({remedy})"
        answers = counts.answerable_questions
        if counts.lost_answers and self.purpose != "prediction":  # a prediction has no loss
            remedies = ["raise --doc_stride to keep longer answers whole"] if counts.cut_answers else []
            if counts.tokenless_answers:
                remedies.append(f"of {counts.tokenless_answers} the tokenizer drops all characters: use another model")
            yield (
                "lost answers",
                f"{counts.lost_answers} of {answers} answers are not completely inside any window, and count as"
                f" missing in the loss ({'; '.join(remedies)})",
            )
        asked = counts.unknown_questions / max(1, counts.questions)
        if max(counts.unknown_share, asked, counts.unknown_answers / max(1, answers)) > UNKNOWN_SHARE:
            texts = [f"{counts.unknown_share:.0%} of the contexts' text", f"{counts.unknown_questions} {questions}"]
            texts += [f"{counts.unknown_answers} of {answers} answers"] if answers else []
            yield (
                "unknown tokens",
                f"{', '.join(texts[:-1])} and {texts[-1]} are unknown tokens, which the model cannot tell apart (name a"
                " model for this language, in training by --model_name_or_path; a word above 100 characters is unknown"
                " to BERT's tokenizers, too)",
            )

    def _of_validation(self) -> Iterator[tuple[str, str]]:
        counts, limit = self.windows, self.max_answer_length
        longer, known = counts.longer_answers(limit), sum(counts.answer_lengths[1:])
        if longer:
            yield (
                "long answers",
                f"{longer} of {known} questions ({longer / known:.1%}) have only answers above --max_answer_length"
                f" {limit}, which no model can give (--max_answer_length {len(counts.answer_lengths) - 1} allows all)",
            )
        has_no_spaces = counts.unspaced_contexts > UNSPACED_SHARE * counts.questions
        if has_no_spaces and self.answer_language not in BY_CHARACTER:
            yield (
                "hardly any spaces",
                f"{counts.unspaced_contexts} of {counts.questions} questions have contexts without spaces between"
                " words, at which EM and F1 split answers (for Chinese, Japanese or Thai add --answer_language zh, ja"
                " or th)",
            )
        if self.shared:
            yield (
                "shared questions",
                f"{self.shared} of {counts.questions} questions are also in the training data, which raises the scores"
                " (remove them from one of the files)",
            )


def _mistakes(findings: Findings) -> str:
    total = sum(findings.mistakes.values())
    kinds = ", ".join(f"{kind}: {number}" for kind, number in findings.mistakes.items())
    scored = f", {total - findings.left_out} scored by their answers' texts" if findings.left_out < total else ""
    first = "; ".join(findings.first)
    return f"{total} questions have mistakes ({kinds}): {findings.left_out} left out{scored}. The first: {first}"


def is_unspaced(text: str) -> bool:
    """Return whether a tenth of a text is in words of several characters without spaces, as in Chinese and Thai."""
    return not text.isascii() and 10 * sum(map(len, _UNSPACED.findall(text))) > len(text)


def has_several_answers(question: Question) -> bool:
    """Return whether a question has different answers at separate positions, as lists do.

    Overlapping answers are the choices of several annotators for one answer.
    """
    if len(question.answer_texts) < 2:
        return False
    given = zip(question.answer_starts, question.answer_texts, strict=True)
    known = sorted((start, text) for start, text in given if start is not None)
    if any(start + len(text) > later for (start, text), (later, _) in pairwise(known)):
        return False
    texts = [text.casefold() for _, text in known]
    return any(one not in other and other not in one for one, other in pairwise(texts))


def question_keys(questions: Sequence[Question]) -> Keys:
    """Return two hashes per question, of its id and its text, and of its context and its text; 0 for a counter.

    They ignore case and spaces, in which two files of the same data may differ.
    """
    context_key = lru_cache(maxsize=1)(lambda context: _hash(_plain(context)))  # neighboring questions share a context
    keys = []
    for question in questions:
        text = _plain(question.question)
        keys.append(bytes(8) if _COUNTER.fullmatch(question.id) else _hash(question.id.encode() + b" " + text))
        keys.append(_hash(context_key(question.context) + text))
    return np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)


def _plain(text: str) -> bytes:
    return text.encode().lower().translate(None, string.whitespace.encode())


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=8).digest()


def count_shared(keys: Keys, others: Keys) -> int:
    """Return the number of questions that are also among others, given the keys of both."""
    shared = [np.isin(keys[:, column], others[:, column]) & (keys[:, column] > 0) for column in range(2)]
    return int(np.count_nonzero(shared[0] | shared[1]))
