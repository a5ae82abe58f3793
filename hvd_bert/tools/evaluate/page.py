"""The results of an evaluation as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_bert.tools.rendering import SHORT
from hvd_bert.tools.rendering.page import Grid, Listing, Page, Text

COMPARISON = (
    "95 % interval: of A - B, by a paired bootstrap of the questions; a difference is clear if it does not contain 0."
    " Only A, only B: questions that only this model answers exactly."
)
THRESHOLDS = (
    "The best scores that another --null_score_diff_threshold would give on these questions. Choose it on other"
    " questions than those whose scores you report."
)


def make_page(results: dict[str, Any]) -> Page:
    """The page of evaluation.json's content."""
    other = results["compared_with"]
    page = Page(f"Evaluation of {results['model']}" + (f" (A) and {other} (B)" if other else ""))
    models = [metrics for metrics in (results["metrics"], results["compared_metrics"]) if metrics]
    losses = " and ".join(f"{metrics['eval_loss']:.4f}" for metrics in models)
    unit = " EM and F1 are in percent." if results["slices"] else ""
    page.add(Text(f"Data: {results['data']}. Validation loss: {losses}.{unit}"), Text("Scores", 2))
    names = ("A", "B") if other else ("",)
    if not results["slices"]:  # another task than question answering
        rows = [[name, *(f"{metrics[name]:.4f}" for metrics in models)] for name in models[0]]
        page.add(Grid(["Metric", *(names if other else ("value",))], rows))
    else:
        overall, *slices = (_scores(title, rows) for title, rows in results["slices"].items())
        differences = _differences(results["slices"]["questions"][0]) if other else ()
        page.add(overall, *differences, Text("Scores by kind of question", 2), *slices)
    if "best_f1" in models[0]:
        thresholds = [row for name, metrics in zip(names, models, strict=True) for row in _thresholds(name, metrics)]
        head = [*(["Model"] if other else []), "Score", "now", "best", "threshold of the best"]
        page.add(Text("Thresholds for no answer", 2), Text(THRESHOLDS), Grid(head, thresholds, words=len(head) - 3))
    if results["mistakes"]:
        page.add(Text("Worst mistakes of A" if other else "Worst mistakes", 2), *_mistakes(results["mistakes"]))
    return page


def _differences(row: dict[str, Any]) -> tuple[Listing, Text]:
    """Whether the two models differ, from the row of all questions."""
    em, f1 = (row["verdict"][name] for name in SHORT)
    return Listing([f"EM: {em} (McNemar's exact test: p = {row['mcnemar_p']:.2g}).", f"F1: {f1}."]), Text(COMPARISON)


def _scores(title: str, rows: Sequence[dict[str, Any]]) -> Grid:
    """EM and F1 of one model; of two both for all questions, and F1 for other slices."""
    first = title.capitalize()
    if "compared" not in rows[0]:
        cells = [[row["slice"], f"{row['questions']:,}", *(f"{row[name]:.2f}" for name in SHORT)] for row in rows]
        return Grid([first, "count", *SHORT.values()], cells)
    both = title == "questions"
    cells = [
        [
            *(row["slice"], *([short] if both else []), f"{row['questions']:,}"),
            *(f"{row[name]:.2f}", f"{row['compared'][name]:.2f}", f"{row[name] - row['compared'][name]:+.2f}"),
            "{:+.2f} to {:+.2f}".format(*row["interval"][name]),
            *(f"{row['only_right']:,}", f"{row['only_compared_right']:,}"),
        ]
        for row in rows
        for name, short in SHORT.items()
        if both or name == "f1"
    ]
    head = ["score", "count", "A", "B"] if both else ["count", "F1 of A", "F1 of B"]
    return Grid([first, *head, "A - B", "95 % interval", "only A", "only B"], cells, words=2 if both else 1)


def _thresholds(name: str, metrics: dict[str, float]) -> Iterator[list[str]]:
    """The best thresholds, with as many digits as it takes to reproduce the best scores."""
    for best, now in (("best_exact", "exact_match"), ("best_f1", "f1")):
        scores = [SHORT[now], f"{metrics[now]:.2f}", f"{metrics[best]:.2f}", repr(metrics[f"{best}_thresh"])]
        yield [name, *scores] if name else scores


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
