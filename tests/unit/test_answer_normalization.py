"""EM and F1 by CMRC's and KorQuAD's rules, compared with values that their official scripts computed
(answer_normalization_golden.json names the scripts)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tables import each

from hvd_bert.data.sources.squad import Question
from hvd_bert.evaluation.answer_rules import ANSWER_RULES
from hvd_bert.evaluation.squad_metric import score

GOLDEN = json.loads((Path(__file__).parent / "answer_normalization_golden.json").read_text(encoding="utf-8"))


def asked(*golds: str) -> Question:
    return Question("q", "", "context", "?", golds, (0,) * len(golds))


@each("version_2", [False, True], ids=["v1.1", "v2.0"])
@each("rules", ["cmrc", "korquad"])
def test_official_values(rules, version_2):
    for row in GOLDEN[rules]:
        if version_2 and not ANSWER_RULES[rules].normalise(row["prediction"]):
            continue  # v2.0's rule for "no answer" comes first, of which these scripts know nothing
        got = score(
            [asked(*row["golds"])],
            {"q": row["prediction"]},
            version_2_with_negative=version_2,
            answer_normalization=rules,
        )
        expected = {"exact_match": 100 * row["exact_match"], "f1": 100 * row["f1"]}
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-9), row


@each(
    ("rules", "gold", "prediction", "exact", "f1"),
    [
        # A run of 3 of 4 characters; SQuAD's rules know only the whole text as one word.
        ("squad", "北京大学", "北京大", 0.0, 0.0),
        ("cmrc", "北京大学", "北京大", 0.0, 6 / 7),
        ("cmrc", "《红楼梦》。", "红楼梦", 1.0, 1.0),
        ("cmrc", "1,000元", "1,000", 0.0, 2 / 3),
        ("cmrc", "ab cd ef", "ef ab", 0.0, 0.4),  # the longest run, not all words in common
        ("squad", "‘한글’은", "한글은", 0.0, 0.0),  # noqa: RUF001
        ("korquad", "‘한글’ 은", "한글 은", 1.0, 1.0),  # noqa: RUF001
        ("korquad", "서울특별시", "서울시", 0.0, 0.75),
        ("korquad", "the TV", "tv", 0.0, 4 / 7),  # articles stay
        ("korquad", "straße", "strasse", 0.0, 10 / 13),  # lower case, in which these differ
        ("cmrc", "中" + "人" * 200, "京" + "人" * 200, 0.0, 200 / 201),  # frequent characters count
    ],
)
def test_rules_differ_as_published(rules, gold, prediction, exact, f1):
    got = score([asked(gold)], {"q": prediction}, answer_normalization=rules)
    assert (got["exact_match"], got["f1"]) == pytest.approx((100 * exact, 100 * f1))


@pytest.mark.parametrize("rules", ANSWER_RULES)
def test_no_answer_is_right_only_for_a_question_without_one(rules):
    questions = [asked("北京"), asked()]
    questions = [Question(f"q{n}", "", "c", "?", q.answer_texts, q.answer_starts) for n, q in enumerate(questions)]
    got = score(questions, {"q0": "", "q1": ""}, version_2_with_negative=True, answer_normalization=rules)
    assert (got["HasAns_f1"], got["NoAns_f1"], got["NoAns_exact"]) == (0, 100, 100)
