"""What a tuning says: what it will do, each point that is decided, and the answer."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

from hvd_bert.bench.points import PRESET
from hvd_bert.config.settings import Config
from hvd_bert.tune.knobs import KNOBS, Knob, Setting
from hvd_bert.tune.runs import Runs
from hvd_bert.tune.search import FAILED, FASTER, NOISE_PAIRS, SEARCH_PAIRS, Point

WIDTH = 52


def announce(runs: Runs, config: Config, wanted: Sequence[Knob], values: Mapping[str, str], own_data: bool) -> None:
    """What is tuned, and over what the gain will be."""
    launching, point = runs.launching, runs.point
    done = f", {len(runs.pairs)} pairs of an earlier start" if runs.pairs else ""
    steps = config.train.max_steps
    print(f"{point.ranks} ranks by {launching.launcher(point)}, runs of {steps} steps in {runs.out}{done}")
    if not own_data:
        print(
            f"warning: no --train_file, --dataset_name or --config is named, so the preset `{PRESET}` is trained. The"
            " best setting depends on the model and the batch: tune with your own.",
            file=sys.stderr,
        )
    warning = launching.warning([point], config.parallel.num_threads or 1)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"Defaults: {' '.join(knob.word + values[knob.name] for knob in wanted)}")
    yours = [knob.word + values[knob.name] for knob in KNOBS if values[knob.name] != knob.default]
    if yours:
        print(f"Set by you: {' '.join(yours)}: every gain is over that")


def plan(
    runs: Runs, candidates: Sequence[Sequence[str]], left_out: Sequence[Mapping[str, str]], max_pairs: int
) -> None:
    """What is left out, and how long the rest may take."""
    held: dict[str, list[str]] = {}
    for words in left_out:
        for word, reason in words.items():
            held.setdefault(reason, []).append(word)
    for reason, words_of in held.items():
        print(f"Left out: {' '.join(words_of)}: {reason}")
    points, each = sum(map(len, candidates)), min(SEARCH_PAIRS, max_pairs)
    lower, upper = (min(NOISE_PAIRS, max_pairs) + points + extra for extra in (0, points * (each - 1) + max_pairs))
    per_pair = 2 * runs.run_s / 60
    print(
        f"{points} points in {lower} to {upper} pairs of runs, {per_pair * lower:.0f} to {per_pair * upper:.0f} min;"
        f" --minutes {runs.budget_s / 60:g} for all, {runs.spent_s / 60:.1f} are spent",
        flush=True,
    )


def head(noise: float) -> None:
    """Of the table."""
    print(f"Noise: {100 * noise:.1f} % (the defaults against themselves)")
    print(f"{'tried':{WIDTH}}  {'gain over the best so far, by pair':36}  verdict", flush=True)


def tell(point: Point) -> None:
    """A row of the table."""
    gains = " ".join(percent(ratio) for ratio in point.ratios)
    words = " ".join(point.setting)
    print(f"{words:{WIDTH}}  {gains:36}  {_verdict(point)}", flush=True)


def _verdict(point: Point) -> str:
    if point.verdict == FAILED:
        return f"{FAILED}: {point.reason}"
    return f"{point.verdict} {percent(1 + point.gain)}" if point.verdict == FASTER else point.verdict


def percent(ratio: float) -> str:
    """A ratio of speeds as a gain."""
    return f"{100 * (ratio - 1):+.1f} %"


def spread(ratios: Sequence[float]) -> str:
    """The median gain of pairs, and their range."""
    return (
        f"{percent(statistics.median(ratios))} ({percent(min(ratios))} to {percent(max(ratios))}, {len(ratios)} pairs)"
    )


def answer(runs: Runs, compared: Point | None, noise: float, fp16: bool) -> None:
    """What to set, or that nothing is to be set; `compared`: the best point against the defaults."""
    print()
    if compared is None:
        print("Keep the defaults: nothing that was tried was faster in each of its pairs.")
    elif compared.verdict == FAILED:
        print(f"Keep the defaults: with {' '.join(compared.setting)} a run failed: {compared.reason}")
    elif compared.verdict != FASTER:
        print(
            f"Keep the defaults: {' '.join(compared.setting)} (the best found) gains {spread(compared.ratios)}:"
            f" within the noise. A gain counts if every pair is faster and the median is above {100 * noise:.1f} %."
        )
    else:
        by_chance = 2 ** len(compared.ratios)
        print(f"Set this; it gains {spread(compared.ratios)} over the defaults. That all pairs are faster happens by")
        print(f"chance once in {by_chance} times; the noise is {100 * noise:.1f} %.")
        _lines(compared.setting, runs.launching.launcher(runs.point))
    if not fp16:
        print("Not tried: --fp16_allreduce, which sends half the bytes and rounds gradients (--knobs fp16).")
    print(f"All pairs: {runs.out / 'tune.json'}")


def _lines(setting: Setting, launcher: str) -> None:
    variables = [word for word in setting if not word.startswith("--")]
    flags = [word for word in setting if word.startswith("--")]
    print()
    for word in variables:
        print(f"    export {word}")
    if flags:
        print(f"    python -m hvd_bert.train ... {' '.join(flags)}")
    if "--fp16_allreduce=True" in flags:
        print("    (gradients are rounded to fp16 on their way: compare the scores as well)")
    if variables and launcher == "mpirun":
        names = [word.partition("=")[0] for word in variables]
        print(f"    mpirun -x {' -x '.join(names)} ...")
    print()
