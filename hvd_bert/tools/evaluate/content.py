"""The results of an evaluation as tables, for the terminal and for an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_bert.evaluation.bootstrap import CONFIDENCE
from hvd_bert.rendering.page import Grid, Listing, Page, Text
from hvd_bert.tools.report.content import SHORT

COMPARISON = (
    f"A - B has an interval of {CONFIDENCE:.0%} confidence, by a paired bootstrap over the questions: it shows what"
    " other questions of this kind could give. It does not cover other seeds of a training. Of many intervals, some"
    " exclude 0 by chance. Only A, only B: questions that only this model answers exactly."
)
THRESHOLDS = (
    "The best scores that another --null_score_diff_threshold would give on these questions. Choose it on other"
    " questions than those whose scores you report."
)


def page_of(results: dict[str, Any]) -> Page:
    """The results as a page."""
    other = results["compared_with"]
    page = Page(f"Evaluation of {results['model']}" + (f" (A) and {other} (B)" if other else ""))
    losses = [metrics["eval_loss"] for metrics in (results["metrics"], results["compared_metrics"]) if metrics]
    shown_losses = " and ".join(f"{loss:.4f}" for loss in losses)
    page.add(Text(f"Data: {results['data']}. Validation loss: {shown_losses}."), Text("Scores", 2))
    if not results["slices"]:  # another task than question answering
        page.add(_metrics(results))
    else:
        overall, *slices = results["slices"].items()
        page.add(*([_all_scores(overall[1]), Text(COMPARISON)] if other else [_grid(*overall)]))
        page.add(Text("Scores by kind of question", 2), *(_grid(title, rows) for title, rows in slices))
    if "best_f1" in results["metrics"]:
        page.add(Text("Thresholds for no answer", 2), Text(THRESHOLDS), _thresholds(results))
    if results["mistakes"]:
        page.add(Text("Worst mistakes" + (" of A" if other else ""), 2), *_mistakes(results["mistakes"]))
    return page


def _metrics(results: dict[str, Any]) -> Grid:
    """The metrics of any task."""
    columns = [results["metrics"], *([results["compared_metrics"]] if results["compared_with"] else [])]
    head = ["Metric", *(("A", "B") if len(columns) == 2 else ("value",))]
    return Grid(head, [[name, *(f"{column[name]:.4f}" for column in columns)] for name in columns[0]])


def _grid(title: str, rows: Sequence[dict[str, Any]]) -> Grid:
    """One slicing: EM and F1 of one model, or the F1 of two."""
    first = title[0].upper() + title[1:]
    if "difference" not in rows[0]:
        cells = [[row["slice"], str(row["questions"]), *(f"{row[name]:.2f}" for name in SHORT)] for row in rows]
        return Grid([first, "count", *SHORT.values()], cells)
    head = [first, "count", "F1 of A", "F1 of B", "A - B", "interval", "only A", "only B"]
    return Grid(head, [[row["slice"], *_compared(row, "f1"), *_right(row)] for row in rows])


def _all_scores(rows: Sequence[dict[str, Any]]) -> Grid:
    """EM and F1 of two models on all questions."""
    head = ["Questions", "score", "count", "A", "B", "A - B", "interval", "only A", "only B"]
    cells = [
        [row["slice"], short, *_compared(row, name), *_right(row)] for row in rows for name, short in SHORT.items()
    ]
    return Grid(head, cells, words=2)


def _compared(row: dict[str, Any], name: str) -> list[str]:
    difference = row["difference"][name]
    interval = f"{difference['low']:+.2f} to {difference['high']:+.2f}"
    scores = [f"{row[name]:.2f}", f"{row['compared'][name]:.2f}", f"{difference['mean']:+.2f}", interval]
    return [str(row["questions"]), *scores]


def _right(row: dict[str, Any]) -> list[str]:
    return [str(row["only_right"]), str(row["only_compared_right"])]


def _thresholds(results: dict[str, Any]) -> Grid:
    """The best thresholds, with as many digits as it takes to reproduce the best scores."""
    rows = []
    for key, name in (("metrics", "A"), ("compared_metrics", "B")):
        metrics = results[key] or {}
        for best, now, short in (("best_exact", "exact_match", "EM"), ("best_f1", "f1", "F1")):
            if metrics:
                model = [name] if results["compared_with"] else []
                rows.append([*model, short, f"{metrics[now]:.2f}", f"{metrics[best]:.2f}", _threshold(metrics, best)])
    head = [*(["Model"] if results["compared_with"] else []), "Score", "now", "best", "threshold of the best"]
    return Grid(head, rows, words=len(head) - 3)


def _threshold(metrics: dict[str, float], best: str) -> str:
    """The best threshold. The official script's is 0.0 if answering nothing is best, also where odds are below 0."""
    answering_nothing = 100.0 * metrics.get("NoAns_total", 0) / metrics["total"]
    if metrics[best] == answering_nothing:
        return "below all odds: never answer"
    return repr(metrics[f"{best}_thresh"])


def _mistakes(mistakes: Sequence[dict[str, Any]]) -> Iterator[Text | Listing]:
    for number, mistake in enumerate(mistakes, start=1):
        yield Text(f"{number}. {mistake['question']}")
        yield Listing(
            [
                f"expected: {' | '.join(mistake['answers']) or '(no answer)'}",
                f"predicted: {mistake['prediction'] or '(no answer)'} (probability {mistake['probability']:.2f},"
                f" F1 {mistake['f1']:.0f})",
                f"context: {mistake['context']}",
            ]
        )
