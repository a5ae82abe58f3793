"""Find the Horovod settings that make training faster here, by short trainings in pairs with the defaults.

    hvd-bert tune --ranks 4 --bf16 --train_file train-v1.1.json --model_name_or_path bert-base-uncased
    hvd-bert tune -H a100-01:2,a100-02:2 --launcher mpirun --minutes 60 --knobs cycle,fusion,fp16
    salloc --nodes=2 --ntasks-per-node=2 --gres=gpu:a100:2 hvd-bert tune

Prints the HOROVOD_... lines and flags to set, with the gain and its spread, or "Keep the defaults"
(docs/guides/tuning.md). Rerun the same command to resume. Exit status: 0 answered, 1 a run with the defaults failed,
2 bad input, 75 stopped by a signal.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence

from hvd_bert.config import command_line
from hvd_bert.config.parser import Parser
from hvd_bert.config.settings import Config
from hvd_bert.config.values import MAX_RUNS, MAX_SECONDS, Limits
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.streams import end_when_lost, keep_running
from hvd_bert.tools.bench import launching as launches
from hvd_bert.tools.bench import points as planning
from hvd_bert.tools.bench.launching import Launching, Machine
from hvd_bert.tools.bench.one_run import exit_status
from hvd_bert.tools.bench.points import PRESET, Point
from hvd_bert.tools.bench.record import opened
from hvd_bert.tools.rendering.text import percent
from hvd_bert.tools.report.comparability import WEAK
from hvd_bert.tools.tune import search
from hvd_bert.tools.tune.runs import FILE, Failed, Runs
from hvd_bert.tools.tune.search import (
    FAILED,
    FASTER,
    KNOBS,
    NOISE_PAIRS,
    SEARCH_PAIRS,
    Knob,
    Search,
    Setting,
    Trial,
)

# Only steps are timed. The user's flags override these.
DEFAULTS = ("--save_steps=0", "--no_do_eval", "--eval_strategy=no", "--logging_steps=5")
# Flags that tuning sets for each run, in all their spellings -> what to do instead.
SET_BY_TUNE = planning.SET_BY_SWEEP | planning.spelled(
    {
        "do_train": "tuning always trains",
        "num_train_epochs": "give --steps",
        "resume_from_checkpoint": "each run is short and starts from scratch",
        "elastic": "the ranks must not change",
        "strategy": "only Horovod is tuned",
    }
)


def main(argv: Sequence[str]) -> int:
    """The command. Returns the exit status."""
    try:
        return exit_status(lambda: _tune(argv))
    except Failed as error:
        print(f"hvd_bert: {error}. Rerun the same command to retry.", file=sys.stderr)
        return EXIT_FAILURE


def make_parser() -> Parser:
    """The parser of tuning's own flags."""
    parser = Parser(prog="hvd-bert tune", allow_abbrev=False)
    parser.description = (
        "Measure by short trainings which of Horovod's settings make training faster, and print those to use. All"
        " other flags go to python -m hvd_bert.train. Use your own model, data and batch: the best settings depend on"
        " them. Without --train_file, --dataset_name or --config it trains the preset `sweep`."
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, limits=Limits(minimum=2),
        help="Number of ranks. (default: the slots of -H, the Slurm job's tasks, this host's GPUs, or 2)",
    )  # fmt: skip
    parser.add_argument(
        "--knobs", metavar="NAME,...", type=lambda text: text.split(","), default=search.DEFAULT_NAMES,
        help=f"Settings to tune: {', '.join(search.NAMES)}. (default: all except fp16, which rounds gradients)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", metavar="N", type=int, default=50, limits=Limits(minimum=2),
        help="Optimizer steps per run; the first is warm-up. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", metavar="N", type=int, default=6, limits=Limits(minimum=1, maximum=MAX_RUNS),
        help="Pairs of runs in the final comparison. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", metavar="M", type=float, default=60, limits=Limits(minimum=0, maximum=MAX_SECONDS),
        help="Time budget; settings not reached within it are skipped. (default: %(default)s)",
    )  # fmt: skip
    launches.add_flags(parser, "runs/tune")
    return parser


def _tune(argv: Sequence[str]) -> int:
    flags, rest = make_parser().parse_known_args(argv)
    keep_running()
    wanted = search.chosen(flags.knobs)
    search.check_environment(os.environ)
    launching = launches.chosen(flags, Machine.here(os.environ))
    point = Point("horovod", flags.ranks or _ranks(launching), WEAK, 1, 0)
    obstacle = launching.obstacle(point)
    if obstacle:
        raise UserError(f"{obstacle}.")
    planning.check_own(rest, SET_BY_TUNE, "tuning")
    threads = launching.threads(os.environ)
    common = [*planning.with_defaults(rest, threads, DEFAULTS), "--strategy=horovod", f"--max_steps={flags.steps}"]
    config = command_line.parse(common)
    planning.check_files(config)
    values = {knob.name: knob.value(os.environ, config) for knob in search.KNOBS}
    environ = dict(os.environ) | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    users = {name: value for name, value in sorted(environ.items()) if name.startswith("HOROVOD_")}
    same = {"--ranks": point.ranks, "-H": flags.H, "the trainer's flags": common, **launching.record()}
    now = {"command": ["hvd-bert", "tune", *argv], **launching.machine.record()}
    runs = Runs(
        launching, point, common, environ, flags.out, flags.timeout, 60 * flags.minutes,
        same | {"HOROVOD_... in the environment": users}, now,
    )  # fmt: skip
    with opened(flags.out, FILE, runs.begin):
        announce(runs, config, wanted, values, planning.names_data(rest))
        return _search(runs, wanted, values, flags.pairs)


def _ranks(launching: Launching) -> int:
    """As many ranks as there is room for; 2 on a host without GPUs."""
    allocation = launching.machine.allocation
    if launching.hosts:
        room = launches.slots_of(launching.hosts)
    elif allocation and launching.choice in ("auto", "srun", "mpirun"):
        room = allocation.nodes * allocation.tasks_per_node
    else:
        room = launching.machine.gpus or 2
    if room < 2:
        raise UserError(
            "A single rank sends nothing, so there is nothing to tune. Use --ranks 2 or more, with room for them."
        )
    return room


def _search(runs: Runs, wanted: Sequence[search.Knob], values: dict[str, str], max_pairs: int) -> int:
    pairs = Search(runs.measure, max_pairs, print_row)
    warm_up = runs.warm_up()
    candidates = [search.candidates(knob, values[knob.name], warm_up) for knob in wanted]
    print_plan(runs, candidates, max_pairs)
    noise = pairs.measure_noise()
    print(f"Noise: {percent(noise)} (the defaults compared with themselves)")
    print(f"{'candidate':{WIDTH}}  {'gain over the best so far, per pair':36}  verdict", flush=True)
    best = pairs.run(candidates)
    compared = pairs.compare(best) if best else None
    result: dict[str, object] = {"noise": noise, "set": [], "compared": vars(compared) if compared else None}
    if compared and compared.verdict == FASTER:
        result["set"] = list(best)
    runs.write(result)
    print_answer(runs, compared, noise, fp16="fp16" in [knob.name for knob in wanted])
    return EXIT_OK


WIDTH = 52


def announce(runs: Runs, config: Config, wanted: Sequence[Knob], values: Mapping[str, str], own_data: bool) -> None:
    """Print what is tuned and the settings that gains are relative to."""
    launching, point = runs.launching, runs.point
    done = f", {len(runs.pairs)} pairs from an earlier start" if runs.pairs else ""
    steps = config.train.max_steps
    print(f"{point.ranks} ranks under {launching.launcher(point)}, runs of {steps} steps in {runs.out}{done}")
    if not own_data:
        print(
            f"warning: no --train_file, --dataset_name or --config given, so the preset `{PRESET}` is trained. The best"
            " settings depend on the model and the batch: tune with your own.",
            file=sys.stderr,
        )
    warning = launching.warning([point], config.parallel.num_threads or 1)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"Defaults: {' '.join(knob.word + values[knob.name] for knob in wanted)}")
    yours = [knob.word + values[knob.name] for knob in KNOBS if values[knob.name] != knob.default]
    if yours:
        print(f"Set by you: {' '.join(yours)} (gains are relative to this)")


def print_plan(runs: Runs, candidates: Sequence[Sequence[str]], max_pairs: int) -> None:
    """Print how long the search may take."""
    points, each = sum(map(len, candidates)), min(SEARCH_PAIRS, max_pairs)
    lower, upper = (min(NOISE_PAIRS, max_pairs) + points + extra for extra in (0, points * (each - 1) + max_pairs))
    per_pair = 2 * runs.run_s / 60
    print(
        f"{points} points in {lower} to {upper} pairs of runs, {per_pair * lower:.0f} to {per_pair * upper:.0f} min;"
        f" {runs.spent_s / 60:.1f} of --minutes {runs.budget_s / 60:g} are used",
        flush=True,
    )


def print_row(point: Trial) -> None:
    """Print a row of the table."""
    gains = " ".join(percent(ratio - 1, "+") for ratio in point.ratios)
    words = " ".join(point.setting)
    more = {FAILED: f": {point.reason}", FASTER: f" {percent(point.gain, '+')}" if point.ratios else ""}
    print(f"{words:{WIDTH}}  {gains:36}  {point.verdict}{more.get(point.verdict, '')}", flush=True)


def _spread(ratios: Sequence[float]) -> str:
    """The median gain of pairs, and their range."""
    middle, low, high = (percent(of(ratios) - 1, "+") for of in (statistics.median, min, max))
    return f"{middle} ({low} to {high}, {len(ratios)} pairs)"


def print_answer(runs: Runs, compared: Trial | None, noise: float, fp16: bool) -> None:
    """Print what to set, if anything. `compared`: the best point, compared with the defaults."""
    print()
    if compared is None:
        print("Keep the defaults: no candidate was faster in all of its pairs.")
    elif compared.verdict == FAILED:
        print(f"Keep the defaults: a run with {' '.join(compared.setting)} failed: {compared.reason}")
    elif compared.verdict != FASTER:
        print(
            f"Keep the defaults: {' '.join(compared.setting)} (the best found) gains {_spread(compared.ratios)}:"
            f" within the noise. A gain counts if every pair is faster and the median is above {percent(noise)}."
        )
    else:
        by_chance = 2 ** len(compared.ratios)
        print(f"Set this: it gains {_spread(compared.ratios)} over the defaults. By chance, all pairs are faster")
        print(f"once in {by_chance} times. The noise is {percent(noise)}.")
        _lines(compared.setting, runs.launching.launcher(runs.point))
    if not fp16:
        print("Not tested: --fp16_allreduce, which halves the bytes sent and rounds gradients (--knobs fp16).")
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
        print("    (gradients are sent in fp16 and rounded: compare the scores as well)")
    if variables and launcher == "mpirun":
        names = [word.partition("=")[0] for word in variables]
        print(f"    mpirun -x {' -x '.join(names)} ...")
    print()


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main(sys.argv[1:]))
