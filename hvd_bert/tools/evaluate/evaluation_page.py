"""Make the page of an evaluation: tables of scores, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_bert.config.data import other_rules
from hvd_bert.tools.rendering import SHORT
from hvd_bert.tools.rendering.page import Grid, Listing, Page, Text

COMPARISON = (
    "95 % interval: interval of A - B, by a paired bootstrap of the questions; a difference is clear if the interval"
    " does not contain 0. Only A, only B: number of questions that only this model answers exactly."
)
THRESHOLDS = (
    "The best scores that another --null_score_diff_threshold would give on these questions. Choose the threshold on"
    " other questions than the ones whose scores you report."
)
BEST = {"exact_match": "best_exact", "f1": "best_f1"}  # metric -> key of its value at the best threshold


def make_page(results: dict[str, Any]) -> Page:
    """Make the page from the content of evaluation.json."""
    other, slices = results["compared_with"], results["slices"]
    page = Page(f"Evaluation of {results['model']}" + (f" (A) and {other} (B)" if other else ""))
    models = [metrics for metrics in (results["metrics"], results["compared_metrics"]) if metrics]
    losses = " and ".join(f"{metrics['eval_loss']:.4f}" for metrics in models)
    rules = other_rules(results["settings"]["answer_language"])
    by = f", by the rules of --answer_language {rules}" if rules else ""
    unit = f" EM and F1 are in percent{by}." if slices else ""
    page.add(Text(f"Data: {results['data']}. Validation loss: {losses}.{unit}"), Text("Scores", 2))
    if not slices:  # a task other than question answering
        rows = [[name, *(f"{metrics[name]:.4f}" for metrics in models)] for name in models[0]]
        page.add(Grid(["Metric", *("AB" if other else ["value"])], rows))
        return page
    first, *others = (_scores(title, rows) for title, rows in slices.items())
    page.add(first)
    if other:
        row = slices["questions"][0]
        em, f1 = (row["verdict"][name] for name in SHORT)
        verdicts = [f"EM: {em} (McNemar's exact test: p = {row['mcnemar_p']:.2g}).", f"F1: {f1}."]
        page.add(Listing(verdicts), Text(COMPARISON))
    page.add(Text("Scores by kind of question", 2), *others)
    if "best_f1" in models[0]:
        page.add(Text("Thresholds for no answer", 2), Text(THRESHOLDS), _thresholds(models))
    if results["mistakes"]:
        page.add(Text("Worst mistakes of A" if other else "Worst mistakes", 2), *_mistakes(results["mistakes"]))
    return page


def _scores(title: str, rows: Sequence[dict[str, Any]]) -> Grid:
    """Make a table of EM and F1 per slice. For two models, tables other than "questions" have only F1."""
    first = title.capitalize()
    if "compared" not in rows[0]:
        cells = [[row["slice"], f"{row['questions']:,}", *(f"{row[name]:.2f}" for name in SHORT)] for row in rows]
        return Grid([first, "count", *SHORT.values()], cells)
    cells = [
        [
            *(row["slice"], SHORT[name], f"{row['questions']:,}"),
            *(f"{row[name]:.2f}", f"{row['compared'][name]:.2f}", f"{row[name] - row['compared'][name]:+.2f}"),
            "{:+.2f} to {:+.2f}".format(*row["interval"][name]),
            *(f"{row['only_right']:,}", f"{row['only_compared_right']:,}"),
        ]
        for row in rows
        for name in (SHORT if title == "questions" else ["f1"])
    ]
    return Grid([first, "score", "count", "A", "B", "A - B", "95 % interval", "only A", "only B"], cells, words=2)


def _thresholds(models: Sequence[dict[str, float]]) -> Grid:
    """Make the table of the best no-answer thresholds, with enough digits to reproduce the best scores."""
    rows = [
        [SHORT[name] + model, f"{metrics[name]:.2f}", f"{metrics[best]:.2f}", repr(metrics[f"{best}_thresh"])]
        for model, metrics in zip((" of A", " of B") if len(models) > 1 else ("",), models, strict=True)
        for name, best in BEST.items()
    ]
    return Grid(["Score", "now", "best", "threshold of the best"], rows)


def _mistakes(mistakes: Sequence[dict[str, Any]]) -> Iterator[Text | Listing]:
    for number, mistake in enumerate(mistakes, start=1):
        expected, predicted = " | ".join(mistake["answers"]), mistake["prediction"]
        likely = f"probability {mistake['probability']:.2f}, F1 {mistake['f1']:.0f}"
        yield Text(f"{number}. {mistake['question']}")
        yield Listing(
            [
                f"expected: {expected or '(no answer)'}",
                f"predicted: {predicted or '(no answer)'} ({likely})",
                f"context: {mistake['context']}",
            ]
        )
