"""EM and F1, compared with SQuAD's scripts and with results of them and of MLQA's (squad_metric_golden.json)."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import official_squad
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from hvd_bert.config.data import BY_CHARACTER
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.sources.squad import Question
from hvd_bert.evaluation.squad_metric import LANGUAGES, score

GOLDEN = json.loads((Path(__file__).parent / "squad_metric_golden.json").read_text(encoding="utf-8"))
V2_NAMES = {"exact": "exact_match", "final_exact": "best_exact", "final_exact_thresh": "best_exact_thresh"}
V2_NAMES |= {"final_f1": "best_f1", "final_f1_thresh": "best_f1_thresh"}
Official = tuple[ModuleType, ModuleType]
Scores = dict[str, float]
Drawn = tuple[list[Question], dict[str, str], dict[str, float]]


@pytest.fixture(scope="module")
def official() -> Official:
    try:
        return official_squad.scripts()
    except official_squad.NotReachableError as error:
        pytest.skip(f"the official scripts are neither cached nor reachable: {error}")


def question(id_: str, golds: list[str]) -> Question:
    return Question(id_, "", " ".join(golds), "?", tuple(golds), (0,) * len(golds))


def as_dataset(questions: list[Question]) -> list[dict[str, Any]]:
    qas = [{"id": q.id, "answers": [{"text": text} for text in q.answer_texts]} for q in questions]
    return [{"paragraphs": [{"qas": qas}]}]


def official_v1(module: ModuleType, questions: list[Question], predictions: dict[str, str]) -> Scores:
    result = module.evaluate(as_dataset(questions), predictions)
    exact, f1 = 100 * result["exact_match"], 100 * result["final_f1"]
    return {"exact_match": exact, "f1": f1, "total": len(questions)}


def official_v2(
    module: ModuleType, questions: list[Question], predictions: dict[str, str], odds: Scores | None, threshold: float
) -> Scores:
    # The standalone script has the flag --na-prob-thresh; the wheel's copy has a default argument instead.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._apply_no_ans_threshold, "__defaults__", (threshold if odds else 1.0,))
        result = module.evaluate(as_dataset(questions), predictions, odds)
    renamed = {V2_NAMES.get(name, name): value for name, value in result.items() if not name.startswith("pr_")}
    # Without odds, the standalone script does not report best thresholds.
    return {name: value for name, value in renamed.items() if odds or not name.startswith("best_")}


def golden(version: str) -> Drawn:
    rows = GOLDEN[version]["rows"]
    questions = [question(str(i), row["golds"]) for i, row in enumerate(rows)]
    predictions = {str(i): row["prediction"] for i, row in enumerate(rows)}
    odds = {str(i): row["null_odds"] for i, row in enumerate(rows) if "null_odds" in row}
    return questions, predictions, odds


def test_golden_values() -> None:
    questions, predictions, _ = golden("v1.1")
    assert score(questions, predictions) == pytest.approx(GOLDEN["v1.1"]["scores"], abs=1e-9)
    questions, predictions, odds = golden("v2.0")
    for threshold, expected in GOLDEN["v2.0"]["scores"].items():
        args = (None, True) if threshold == "none" else (odds, True, float(threshold))
        assert score(questions, predictions, *args) == pytest.approx(expected, abs=1e-9), threshold


def test_golden_values_equal_the_official_scripts(official: Official) -> None:
    questions, predictions, _ = golden("v1.1")
    scores = official_v1(official[0], questions, predictions)
    assert scores == pytest.approx(GOLDEN["v1.1"]["scores"], abs=1e-9)
    questions, predictions, odds = golden("v2.0")
    for threshold, expected in GOLDEN["v2.0"]["scores"].items():
        args = (None, 0.0) if threshold == "none" else (odds, float(threshold))
        assert official_v2(official[1], questions, predictions, *args) == pytest.approx(expected, abs=1e-9)


# By hand: the languages for which MLQA's script has no rules.
OTHERS_BY_HAND = {
    "ja": [["東京駅", "東京駅の南", 0, 0.75], ["『ガラス2022年』", "ガラス 2022 年", 1, 1], ["か\u3099", "か", 0, 0]],
    "th": [["กรุงเทพ", "กรุง", 0, 2 / 3], ["น้ำ 12 ขวด", "น้ำ๏12ขวด", 1, 1], ["นา", "น้า", 0, 0.5]],
    "other": [["«L\u2019église»", "l'église", 1, 1], ["서울에서", "서울", 0, 0], ["The 5\u20136.", "the 56", 1, 1]],
}


@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "squad"])
def test_answers_in_other_languages(language: str) -> None:
    pairs = (GOLDEN["mlqa"]["pairs"] | OTHERS_BY_HAND)[language]
    for gold, prediction, *expected in pairs:
        scores = score([question("q", [gold])], {"q": prediction}, answer_language=language)
        assert [scores["exact_match"], scores["f1"]] == pytest.approx([100 * value for value in expected]), gold
    assert set(LANGUAGES) == {*FLAGS["answer_language"].choices}
    assert tuple(name for name, rules in LANGUAGES.items() if rules.characters) == BY_CHARACTER
    punctuation = score([question("q", ["¿"])], {"q": ""}, {"q": -1.0}, True, answer_language=language)
    assert punctuation["best_f1"] == punctuation["f1"] == 100.0, "v2.0: no words are no answer"


def test_a_language_without_rules_is_refused():
    with refused("'fr'", "other"):
        score([question("q", ["la"])], {"q": "la"}, answer_language="fr")


# Articles, punctuation, composed and decomposed accents, other writing systems, blanks.
ENGLISH = "a An the The. cat Cat's cat, theory 10% $5.00 U.S. - a-b x_y"
OTHERS = "caf\u00e9 cafe\u0301 \u0130stanbul \ufb01sh straße «dog» … …the 北京 \u0391\u03a3"
WORDS = [*ENGLISH.split(), *OTHERS.split(), "\u00a0", "\t"]
texts = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join),
    st.text(max_size=8),
    st.sampled_from(["", " ", "the", "A!", "?"]),
)


@st.composite
def scored(draw: st.DrawFn, min_golds: int) -> Drawn:
    questions, predictions, odds = [], {}, {}
    for i in range(draw(st.integers(1, 8))):
        golds = draw(st.lists(texts, min_size=min_golds, max_size=3))
        changed = [change for gold in golds for change in (gold, f"The {gold}!", gold.upper())]
        near = [*changed, " ".join(golds)]
        predictions[str(i)] = draw(st.one_of(st.sampled_from(near), texts))
        odds[str(i)] = draw(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 7.5]))
        questions.append(question(str(i), golds))
    return questions, predictions, odds


@given(scored(min_golds=1))
def test_v1_equals_the_official_script(official: Official, drawn: Drawn) -> None:
    questions, predictions, _ = drawn
    expected = official_v1(official[0], questions, predictions)
    assert score(questions, predictions) == pytest.approx(expected, abs=1e-9)


@given(scored(min_golds=0), st.sampled_from([-1.0, 0.0, 0.25, 1.0, 100.0]), st.booleans())
def test_v2_equals_the_official_script(official: Official, drawn: Drawn, threshold: float, with_odds: bool) -> None:
    questions, predictions, odds = drawn
    given_odds = odds if with_odds else None
    expected = official_v2(official[1], questions, predictions, given_odds, threshold)
    assert score(questions, predictions, given_odds, True, threshold) == pytest.approx(expected, abs=1e-9)


def test_best_threshold_above_the_used_threshold_needs_the_best_spans() -> None:
    questions = [question("q1", ["cat"]), question("q2", ["dog"]), question("q3", [])]
    spans, odds = {"q1": "cat", "q2": "dog", "q3": "cow"}, {"q1": -1.0, "q2": 2.0, "q3": 3.0}
    result = score(questions, spans, odds, True, 0.0)
    assert (result["f1"], result["best_f1"]) == (pytest.approx(200 / 3), 100.0)
    assert result["best_f1_thresh"] == 2.0
    assert score(questions, {**spans, "q2": "", "q3": ""}, odds, True)["best_f1"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(("threshold", "exact"), [({"null_score_diff_threshold": 0.5}, 100.0), ({}, 0.0)])
def test_odds_must_exceed_the_threshold(threshold: dict[str, float], exact: float) -> None:
    """An answer counts as "no answer" if its odds exceed the threshold, by default 0."""
    scores = score([question("q", ["Ada"])], {"q": "Ada"}, {"q": 0.5}, True, **threshold)
    assert scores["exact_match"] == exact
