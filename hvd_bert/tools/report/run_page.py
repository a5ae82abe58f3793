"""Make the page of a run: results, curves, step time, hosts and ranks, settings."""

from __future__ import annotations

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.monitoring import PHASES
from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering import DASH, counted, digits, duration, number, percent, seconds, shown
from hvd_bert.tools.rendering.page import Block, Code, Details, Figures, Grid, Listing, Page, Quote, Status, Text
from hvd_bert.tools.report import curves, setup
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.tolerant import converted, finite_number, objects

NO_REASON = (
    "No reason is recorded: the job may have been killed. Its log has more. To resume, rerun the same command with the"
    " same --output_dir."
)
RECENT = 20  # number of last log lines from which the remaining time of a running run is estimated
MAX_ROWS, MAX_NAMES = 50, 8  # maximum number of skipped steps in the table, and of window names per step


def make_page(record: Record) -> Page:
    """Make the page of a run."""
    page = Page(f"Run {record.name}", [*_about(record), status(record), Figures(figures(record))])
    page.add_section("Training", *curves.run_charts(record))
    page.add_section("Skipped steps", *_skipped_steps(record))
    page.add_section("Step time", *_step_time(record))
    page.add_section("GPU usage", *curves.gpu_usage(record))
    page.add_section("Sample answers", *_samples(record))
    page.add_section("Hosts and ranks", *_ranks(record))
    page.add_section("Checkpoints", *_checkpoints(record))
    page.add_section("Warnings", Listing([*_warnings(record), *record.problems]))
    page.add_section("Set-up", Text(setup.paragraph([record])))
    page.add_section("Settings", *setup.settings(record))
    page.add_section("Versions and hardware", *_versions(record))
    page.add_section("Reproduce", *_reproduce(record))
    return page


def _about(record: Record) -> list[Block]:
    """Describe model, data and start time in one line; empty if they are unknown."""
    settings, start = record.settings, finite_number(record.facts.get("time"))
    data = settings.get("dataset_name") or settings.get("train_file") or []
    used = [[settings.get("model_name_or_path") or ""], data if isinstance(data, list) else [data]]
    text = " on ".join(filter(None, (", ".join(Path(str(name)).name for name in names) for names in used)))
    if text and start:
        text += f", started {datetime.datetime.fromtimestamp(start).astimezone():%Y-%m-%d %H:%M %Z}"
    return [Text(text)] if text else []


def status(record: Record) -> Status:
    """Describe the state of the run: finished with its results, running, or ended early with the reason."""
    total = record.number("train_steps")
    reached = f"step {record.step:,}" + (f" of {total:,.0f} ({record.step / total:.0%})" if total else "")
    if record.state == "running":
        recent = record.steps["step_s"][1:][-RECENT:]
        remaining = finite_number(max(0, total - record.step) * np.median(recent)) if total and len(recent) else None
        left = f", about {duration(remaining)} remaining without evaluations" if remaining is not None else ""
        now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        return Status("Still running.", f"At {now}: {reached}{left}. All figures are preliminary.", "busy")
    if record.state == "ended":
        return Status(f"Not finished, last logged {reached}.", record.ended or NO_REASON, "bad")
    if not record.trained:
        return Status("Finished.", "Evaluated only.", "good")
    return Status("Finished:", _result(record), "good")


def _result(record: Record) -> str:
    """Describe the results of a finished training in a sentence, without per-file scores."""
    names = [name for name in record.score_names if not any(name.endswith(f"_{n}") for n in record.score_names)]
    scores = [f"{curves.score_name(name)}{record.rules} {_figure(record.score(name))}" for name in names]
    work = [f"{record.step:,} steps"] if record.step else []
    seconds, size = record.number("train_runtime"), record.number("world_size")
    work += [f"in {duration(seconds)}"] if seconds is not None else []
    work += [f"on {counted(size, 'rank')}"] if size else []
    work += [f"with {record.facts['strategy']}"] if "strategy" in record.facts else []
    batch = record.number("global_batch")
    work += [f"and a global batch of {batch:,.0f}"] if batch else []
    return " after ".join(filter(None, (" and ".join(scores), " ".join(work)))) + "."


def figures(record: Record) -> list[tuple[str, str]]:
    """Return the run's main figures as pairs of name and formatted value."""
    found = [(curves.score_name(name) + record.rules, _figure(record.score(name))) for name in record.score_names]
    losses = record.steps["loss"]
    if "eval_loss" in record.scores:
        found.append(("validation loss", _figure(record.scores["eval_loss"])))
    elif len(losses):
        found.append(("training loss", _figure(losses[-1])))
    if math.isfinite(record.windows_per_s):
        found.append((f"{record.unit}/s", digits(record.windows_per_s)))
    for key, name in (("mfu", "model FLOPs (MFU)"), ("padding_share", "padding")):
        mean = record.steps.mean(key, by_time=True)
        if mean > 0:
            found.append((name, percent(mean)))
    runtime = record.number("train_runtime")
    if runtime is not None:
        found.append(("training time", duration(runtime)))
    energy, rate = record.number("energy_wh"), record.wh_per_1000
    if energy is not None and rate is not None:
        found += [("GPU energy", f"{digits(energy)} Wh"), (f"Wh per 1,000 {record.unit}", digits(rate))]
    if "world_size" in record.facts:
        found.append(("ranks", shown(record.facts["world_size"])))
    return found


def _figure(value: Any) -> str:
    return number(finite_number(value))


def _skipped_steps(record: Record) -> list[Block]:
    """Make the table of the last skipped steps; empty if no step was skipped."""
    rows = []
    for event in record.skipped_steps[-MAX_ROWS:]:
        first, *_ = [*objects(event.get("batch")), {}]
        windows = [str(name) for name in converted(first.get("windows"), list[Any], [])]
        text = ", ".join(windows[:MAX_NAMES]) or DASH
        text += f" and {len(windows) - MAX_NAMES} more" if len(windows) > MAX_NAMES else ""
        rows.append([str(event.get("step", DASH)), str(first.get("rank", DASH)), text])
    if not rows:
        return []
    left_out = len(record.skipped_steps) - len(rows)
    note = (
        "Their gradients were not finite. Listed are the ranks whose loss is not finite. events.jsonl has all windows."
    )
    if left_out:
        note += f" {left_out} earlier events are not shown."
    return [Grid(["step", "rank", "windows of that rank"], rows, words=3), Text(note)]


def _step_time(record: Record) -> list[Block]:
    """Make the table of mean times per phase, and a chart; empty if fewer than two lines are logged."""
    steps = record.steps
    if len(steps) < 2 or "step_s" not in steps:
        return []
    kinds = {"": "per step"}
    if "compute_min_s" in steps:  # recorded only with several ranks
        kinds |= {"_min": "minimum over ranks", "_max": "maximum over ranks"}
    rows, whole = [], steps.mean("step_s")
    for phase in (*PHASES, "step"):
        means = [steps.mean(f"{phase}{kind}_s") for kind in kinds]
        if not math.isnan(means[0]):
            share = percent(means[0] / whole) if whole > 0 else DASH
            rows.append([PHASES.get(phase, phase), *map(seconds, means), share])
    note = "Means over the logged steps after the first log line, which is warm-up."
    return [Grid(["phase", *kinds.values(), "share"], rows), Text(note), curves.step_time(record)]


def _samples(record: Record) -> Iterator[Block]:
    for right, title in ((True, "Right"), (False, "Wrong")):
        samples = [sample for sample in record.samples if (sample.get("exact_match") == 100) is right]
        if samples:
            yield Text(f"{title} ({len(samples)})", 3)
            yield from map(_sample, samples)


def _sample(sample: Mapping[str, Any]) -> Details:
    """Show a sample: the context with the gold answer marked, and the model's prediction."""
    golds = [str(answer) for answer in converted(sample.get("answers"), list[Any], [])]
    predicted = str(sample.get("prediction", "")) or "no answer"
    rows = [
        ["predicted", predicted],
        ["gold", "; ".join(golds) or "no answer"],
        ["probability", _figure(sample.get("probability"))],
        ["F1", _figure(sample.get("f1"))],
        ["id", str(sample.get("id"))],
    ]
    context, start = str(sample.get("context", "")), max(0, converted(sample.get("answer_start"), int, 0))
    gold = golds[0] if golds else ""
    before, marked, after = context[start:].partition(gold) if gold else (context[start:], "", "")
    quote = Quote(context[:start] + before, marked, after)
    return Details(f"{sample.get('question')} - {predicted}", [quote, Grid(["field", "value"], rows, words=2)])


def _ranks(record: Record) -> list[Block]:
    """Make the table of hosts with their ranks, and a folded table of ranks with times and memory."""
    ranks = record.entries("ranks")
    if not ranks:
        return []
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        by_host.setdefault(str(rank.get("host", DASH)), []).append(rank)
    hosts = [
        [host, *(", ".join(dict.fromkeys(shown(rank.get(key)) for rank in members)) for key in ("rank", "device"))]
        for host, members in by_host.items()
    ]
    processes = {str(process.get("rank")): process for process in record.entries("processes")}
    rows = []
    for rank in ranks:
        process = processes.get(str(rank.get("rank")), {})
        memory = finite_number(process.get("memory_peak_bytes"))
        times = [_figure(process.get(key)) for key in ("real_s", "user_s", "system_s")]
        cells = [shown(rank.get(key)) for key in ("rank", "host", "local_rank", "device")]
        rows.append([*cells, *times, number(memory and memory / GIB, ".2f")])
    head = ["rank", "host", "local rank", "device", "real, s", "user, s", "system, s", "memory, GiB"]
    return [
        Grid(["host", "ranks", "devices"], hosts, words=3),
        Details("Time and memory of each rank", [Grid(head, rows, words=4)]),
    ]


def _checkpoints(record: Record) -> list[Block]:
    rows = [[f"checkpoint-{step}", str(step)] for step in record.checkpoints]
    best, value = record.best, finite_number(record.best.get("value"))
    name = best.get("metric")
    rules = record.curve_rules if name in record.score_names else ""
    text = "" if value is None else f"Best {name}{rules}: {value:.4g}, at step {best.get('step')}."
    return [*([Grid(["checkpoint", "step"], rows)] if rows else []), Text(text)]


def _warnings(record: Record) -> list[str]:
    counts: Counter[str] = Counter()
    for event in record.warnings:
        ranks = converted(event.get("ranks"), list[int], [])
        by = f"{describe_ranks(ranks)}: " if ranks not in ([], [0]) else ""
        counts[f"{by}{event.get('message')}"] += 1
    return [text + (f" ({count} times)" if count > 1 else "") for text, count in counts.items()]


def _versions(record: Record) -> list[Block]:
    facts = record.facts
    keys = ("device_name", "threads_per_rank", "precision", "controller", "devices_per_rank")
    rows = [[key.replace("_", " "), shown(facts[key])] for key in keys if key in facts]
    rows += [[f"job {name}", shown(value)] for name, value in record.object("job").items()]
    rows += [[name, shown(value)] for name, value in record.object("versions").items()]
    return [Grid(["name", "value"], rows, words=2)] if rows else []


def _reproduce(record: Record) -> list[Block]:
    blocks: list[Block] = []
    command, launcher = record.facts.get("command"), record.facts.get("launcher")
    size = len(record.entries("ranks"))
    if command:
        by = f" by {launcher}" if launcher not in (None, "none") else ""
        started = f"Each of the {size} ranks was started{by} as:" if size > 1 else "The run was started as:"
        blocks += [Text(started), Code(str(command))]
    if record.settings:
        blocks.append(
            Text(f"{'Under the same launcher, this' if size > 1 else 'This'} command uses the run's settings:")
        )
        name = "train_config.yaml" if record.settings.get("do_train", True) else "eval_config.yaml"
        file = shlex.quote(f"{record.name}/{name}")
        blocks.append(Code(f"python -m hvd_bert.train --config {file} --output_dir NEW_FOLDER"))
    return blocks


def summary(record: Record) -> Sequence[str]:
    """Summarize the run in a few lines for the terminal."""
    state = status(record)
    return [f"{record.name}: {state.label} {state.text}", *(f"  {name}: {value}" for name, value in figures(record))]
