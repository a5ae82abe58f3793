"""The report: figures compared with results computed by hand, refused input, and written files."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from documented import undocumented
from made_runs import make_run, text_of
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from PIL import Image

from hvd_bert.tools.rendering.page import latex
from hvd_bert.tools.rendering.report_files import FORMATS
from hvd_bert.tools.report import comparison, plots
from hvd_bert.tools.report.__main__ import main
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.runs_page import interval, repeats
from hvd_bert.tools.runs import finding, record

PAGE = 345  # points: the width of a text in LaTeX's article


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace plots by empty files, except in tests marked slow: a plot takes a second."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(plots, "panel", lambda *_: dict.fromkeys(FORMATS, b""))


def report(folder: Path, *flags: str) -> list[dict[str, str]]:
    """Run the report command on `folder`/runs. Returns the rows of report.csv."""
    assert main([str(folder / "runs"), "--out", str(folder / "out"), "--overwrite", *flags]) == 0
    return read_csv(folder / "out" / "report.csv")


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def make_repeats(folder: Path, strategy: str, ranks: int, *speeds: float, **facts: Any) -> list[Path]:
    """Make one run per throughput in `speeds` (windows/s), with seeds 0, 1, ..."""
    name = folder / f"runs/{strategy}-{ranks}-"
    return [
        make_run(Path(f"{name}{seed}"), strategy, ranks, windows_per_s=speed, seed=seed, **facts)
        for seed, speed in enumerate(speeds)
    ]


def row(rows: list[dict[str, str]], scaling: str, strategy: str, ranks: int) -> dict[str, str]:
    (found,) = [r for r in rows if (r["scaling"], r["strategy"], r["ranks"]) == (scaling, strategy, str(ranks))]
    return found


def page(folder: Path) -> str:
    """Return the text of the page that `report` wrote."""
    return text_of(folder / "out/report.html")


def test_speedup_efficiency_and_spread_by_hand(tmp_path, capsys):
    make_repeats(tmp_path, "none", 1, 9.0, 10.0, 12.0)
    make_repeats(tmp_path, "horovod", 2, 17.0, 18.0, 20.0, nodes=2)
    rows = report(tmp_path)
    base, hvd = row(rows, "strong", "none", 1), row(rows, "strong", "horovod", 2)
    figures = ("windows_per_s", "speedup", "speedup_least", "speedup_most", "efficiency")
    # Fewer than 4 repeats: the range covers all of them.
    assert [float(base[name]) for name in figures] == pytest.approx([10.0, 1.0, 9 / 12, 12 / 9, 1.0])
    # 16 windows at 2 windows/s in warm-up, then 39 steps of 16 windows at 18 windows/s.
    runtime = 8 + 39 * 16 / 18
    figures += ("serial_fraction", "train_runtime_s", "total_speedup", "device_hours")
    expected = [18.0, 1.8, 17 / 12, 20 / 9, 0.9, (1 / 1.8 - 1 / 2) / (1 - 1 / 2)]
    expected += [runtime, (8 + 39 * 16 / 10) / runtime, 2 * runtime / 3600]
    assert [float(hvd[name]) for name in figures] == pytest.approx(expected)
    assert (len(rows), hvd["runs"], hvd["reason"], base["serial_fraction"]) == (2, "3", "", "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Strong scaling: global batch 16 (baseline: none, 1 rank)"
    assert " ".join(lines[3].split()) == "horovod 2 2 0.71 1.80 1.42 to 2.22 0.90 18.00 0.0237 3"
    # Terminal, page, LaTeX and CSV must have the same figures.
    sentence = "1.80 times as fast on 2 ranks with horovod compared with none, 1 rank (efficiency 90%, lowest to"
    figures = ["horovod", "2", "2", "0.71", "1.80", "1.42 to 2.22", "0.90", "1.65", "0.111", "18.00", "0.0237", "3"]
    assert sentence in page(tmp_path) and f"{' | '.join(figures)}\n" in page(tmp_path)
    narrow = [figures[column] for column in (0, 1, 2, 3, 4, 5, 6, 9, 11)]
    assert rf"{' & '.join(narrow)} \\" in (tmp_path / "out/report.tex").read_text().splitlines()


def test_strong_and_weak_scaling_are_separated(tmp_path):
    for ranks, speed in ((1, 10.0), (2, 18.0), (4, 30.0)):
        strategy = "horovod" if ranks > 1 else "none"
        make_run(tmp_path / f"runs/strong-{ranks}", strategy, ranks, 16, speed, unit="images")
        if ranks != 2:  # 2 ranks with 8 images each already exist: they are in both tables
            make_run(tmp_path / f"runs/weak-{ranks}", strategy, ranks, 8 * ranks, 0.9 * speed, unit="images")
    make_run(tmp_path / "runs/epochs", "ddp", 2, 16, 18, steps=20, seed=7, unit="images")  # as many windows as weak-1
    rows = report(tmp_path)
    sizes = {(r["scaling"], r["size"], r["global_batch"]) for r in rows}
    assert sizes == {("strong", "16", "16"), ("weak", "8", "8"), ("weak", "8", "16"), ("weak", "8", "32")}
    for scaling, ranks, speedup in (("strong", 4, 3.0), ("weak", 4, 3.0), ("weak", 2, 2.0)):
        assert float(row(rows, scaling, "horovod", ranks)["speedup"]) == pytest.approx(speedup)
    assert float(row(rows, "weak", "ddp", 2)["efficiency"]) == pytest.approx(1.0)
    text = page(tmp_path)
    assert "Strong scaling: global batch 16" in text and "Weak scaling: 8 images per device and step" in text


def test_processes_memory_and_scores(tmp_path):
    make_run(tmp_path / "runs/none", scores=(60.0, 70.0))
    make_run(
        tmp_path / "runs/hvd", "horovod", 3, windows_per_s=24, scores=(61.0, 71.5), exposed_comm_s=0.06, energy_wh=3.2
    )
    make_run(tmp_path / "runs/fsdp", "fsdp", 3, windows_per_s=24, scores={"accuracy": 0.75}, exposed_comm_s=None)
    make_run(tmp_path / "runs/dp", "dp", 1, windows_per_s=16, devices_per_rank=4)
    rows = report(tmp_path)
    assert float(row(rows, "strong", "dp", 1)["efficiency"]) == pytest.approx(0.4)  # one rank with four GPUs
    _, costs = page(tmp_path).split("strategy | ranks | windows/s, min to max")
    cells = {row[0]: row for row in (line.split(" | ") for line in costs.splitlines()[:6])}
    # Three ranks: median time 101 s, maximum memory 3 GiB; 0.06 s exposed communication per step of 16/24 s is 9 %.
    assert cells["horovod"][1:8] == ["3", "24.00 to 24.00", "101.0", "90.0", "5.0", "3.00", "3.2"]
    assert cells["horovod"][8:10] == ["5", "9.0%"]  # 3.2 Wh for 640 windows
    energies = {run["strategy"]: run["wh_per_1000_windows"] for run in read_csv(tmp_path / "out/runs.csv")}
    assert energies == {"none": "", "horovod": "5.0", "fsdp": "", "dp": ""}
    assert cells["horovod"][-3:] == ["61.00", "71.50", "-"]
    assert cells["fsdp"][7:10] == ["-"] * 3 and cells["fsdp"][-3:] == ["-", "-", "0.7500"]
    scores = {run["strategy"]: (run["f1"], run["accuracy"]) for run in read_csv(tmp_path / "out/runs.csv")}
    assert scores == {"none": ("70.0", ""), "horovod": ("71.5", ""), "fsdp": ("", "0.75"), "dp": ("", "")}


def test_scores_by_different_rules_have_separate_columns(tmp_path, capsys):
    zh = {"answer_language": "zh"}
    scored = {"none": {}, "zh": zh, "scored_later": zh}
    for seed, (name, rules) in enumerate(scored.items()):
        work = {f"--{key}": value for key, value in rules.items() if name == "zh"}
        folder = make_run(tmp_path / "runs" / name, seed=seed, scores=(50.0, 60.0 + seed), work=work, best={})
        with (folder / "train_config.yaml").open("a") as file:
            file.writelines(f"{key[2:]}: {value}\n" for key, value in work.items())
        results = json.loads((folder / "eval_results.json").read_text())
        (folder / "eval_results.json").write_text(json.dumps(results | rules))
    report(tmp_path)
    rows = {Path(run["run"]).name: (run["f1"], run["f1 (zh)"]) for run in read_csv(tmp_path / "out/runs.csv")}
    assert rows == {"none": ("60.0", ""), "zh": ("", "61.0"), "scored_later": ("", "62.0")}
    text, printed = page(tmp_path), capsys.readouterr().out
    assert "F1 and F1 (zh) follow different rules (--answer_language)" in text
    assert text.count("EM | F1 | EM (zh) | F1 (zh)") == 1 and "--answer_language is zh, the baseline's squad" in printed
    assert "F1 (zh) | 1 | 62" in text, "no mean over different rules"
    runs = [record.read(tmp_path / "runs" / name) for name in scored]
    assert [run.rules for run in runs] == ["", " (zh)", " (zh)"]
    assert [run.curve_rules for run in runs] == ["", " (zh)", ""], "metrics.jsonl has the training's scores"


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    for loss in (4.0, 5.0):  # the baseline's repeats disagree
        make_run(tmp_path / f"runs/none-{loss}", loss=loss)
    make_run(tmp_path / "runs/ddp", "ddp", 2, windows_per_s=51.2)
    make_run(tmp_path / "runs/other", "ddp", 2, learning_rate=1e-4)
    assert [row["speedup"] for row in report(tmp_path)] == ["", "", ""]
    assert not (tmp_path / "out/report.tex").exists() and "No two of these runs" in page(tmp_path)
    for text in (capsys.readouterr().out, page(tmp_path)):
        assert "own repeats do not agree" in text and "learning rate: 0.0001, the baseline's 5e-05" in text


NOISY = {"work": {"--dropout": None}}
# DDP on two ranks is made implausibly fast, so that a wrongly reported speed-up is easy to find: 5.12.
ALONE, TWO = {"batch": 8}, {"batch": 16, "windows_per_s": 51.2}


@pytest.mark.parametrize(
    ("base", "other", "reason"),
    [
        (ALONE, TWO | {"work": {"--max_seq_length": 128}}, "--max_seq_length is 128, the baseline's 384"),
        (ALONE, TWO | {"steps": 16}, "neither the same steps (16, the baseline's 40) nor the same windows (256"),
        (ALONE, TWO | {"last_loss": 4.9}, "the losses do not agree"),
        (ALONE, TWO | {"threads_per_rank": 2}, "2 thread(s) per rank, the baseline's 1"),
        ({}, {"loss": 5.004}, ""),  # 0.8e-3 relative difference
        ({}, {"loss": 5.006}, "at step 1 5.006 in "),  # 1.2e-3 relative difference
        ({"every": 5}, {"every": 2}, ""),  # means over different steps are not compared
        # The baseline's mean loss over the final ten of 40 steps is 5 - 4 * 34.5 / 39 = 1.4615.
        (NOISY, NOISY | {"loss": 5.5, "last_loss": 1.08}, ""),  # mean 1.5898, 8.8 % higher
        ({}, {"seed": 7, "loss": 5.5, "last_loss": 1.15}, "the mean of the last quarter is 1.652"),  # 13 % higher
        ({"loss": 0.001, "last_loss": 0.001}, {"loss": 0.004, "last_loss": 0.004, "seed": 7}, ""),  # both near zero
    ],
)
def test_only_the_same_work_with_the_same_losses_has_a_speedup(tmp_path, capsys, base, other, reason):
    make_run(tmp_path / "runs/none", **base)
    make_run(tmp_path / "runs/ddp", "ddp", 2, **other)
    honest = base | {"batch": other.get("batch", 16), "windows_per_s": 18.0}
    make_run(tmp_path / "runs/honest", "horovod", 2, **honest)
    rows = {row["strategy"]: row for row in report(tmp_path)}
    assert reason in rows["ddp"]["reason"] and (rows["ddp"]["speedup"] == "") == bool(reason)
    assert float(rows["horovod"]["speedup"]) == pytest.approx(1.8)
    shown = capsys.readouterr().out
    assert reason in shown and "5.12" not in shown + page(tmp_path)


def test_weak_scaling_compares_losses_on_as_many_devices(tmp_path):
    # Losses depend on the global batch. fsdp is wrong: it has 2 ranks' batch, but the losses of the 1-rank baseline.
    losses = {("none", 1): 5.0, ("horovod", 2): 4.5, ("ddp", 2): 4.5, ("fsdp", 2): 5.0, ("horovod", 4): 1.0}
    for (strategy, ranks), loss in losses.items():
        make_run(tmp_path / f"runs/{strategy}-{ranks}", strategy, ranks, 8 * ranks, loss=loss)
    rows = report(tmp_path)
    assert row(rows, "weak", "horovod", 2)["speedup"] != "" != row(rows, "weak", "ddp", 2)["speedup"]
    assert "The losses of horovod, 4 ranks were compared with no" in page(tmp_path)
    assert "the losses do not agree" in row(rows, "weak", "fsdp", 2)["reason"]


def test_other_hardware_is_left_out_and_one_world_size_is_side_by_side(tmp_path):
    make_run(tmp_path / "runs/hvd", "horovod", 2, windows_per_s=20)
    make_run(tmp_path / "runs/ddp", "ddp", 2, windows_per_s=19)
    make_run(tmp_path / "runs/gpu", "horovod", 4, windows_per_s=900, device_name="NVIDIA A100")
    rows = report(tmp_path)
    ddp = row(rows, "side by side", "ddp", 2)
    assert (float(ddp["speedup"]), ddp["speedup_least"]) == (pytest.approx(0.95), ""), "a single run has no range"
    assert "Side by side on 2 devices: global batch 16" in page(tmp_path)
    runs = read_csv(tmp_path / "out/runs.csv")
    assert len(rows) == 2 and undocumented(rows, "Report CSV files") == undocumented(runs, "Report CSV files") == []
    other = report(tmp_path, "--baseline", "ddp:2")
    assert float(row(other, "side by side", "horovod", 2)["speedup"]) == pytest.approx(20 / 19)
    left_out = {r["run"]: r["left_out"] for r in runs if r["left_out"]}
    assert left_out == {str(tmp_path / "runs/gpu"): "ran on NVIDIA A100, most runs on AMD EPYC: report it separately"}


def test_communication_settings_have_rows_and_two_experiments_have_tables(tmp_path):
    for data in ("v1", "v2"):
        make_run(tmp_path / f"runs/{data}-1", windows_per_s=10, work={"the training data": data})
        for fp16, speed in ((False, 18), (True, 19)):
            work = {"the training data": data, "--fp16_allreduce": fp16}
            make_run(tmp_path / f"runs/{data}-{fp16}", "horovod", 2, windows_per_s=speed, work=work)
    rows = report(tmp_path)
    assert sorted((r["strategy"], float(r["speedup"])) for r in rows) == [
        *[("horovod (fp16_allreduce False)", pytest.approx(1.8))] * 2,
        *[("horovod (fp16_allreduce True)", pytest.approx(1.9))] * 2,
        *[("none", 1.0)] * 2,
    ]
    # Each table has its own plots.
    names = [f"scaling_{number}_{panel}.png" for number in (1, 2) for panel in sorted(plots.MEASURES)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == names


def test_caveats(tmp_path):
    for strategy, ranks, *speeds in (("none", 1, 9.6, 10.0, 10.4), ("horovod", 2, 17.0, 18.0, 20.0), ("ddp", 2, 25.0)):
        make_repeats(tmp_path, strategy, ranks, *speeds)
    report(tmp_path)
    text = page(tmp_path)
    assert "horovod, 2 ranks are more than 10% apart" in text and "efficiency of 1.25" in text and "only 1 run" in text
    for name, ranks in (("none", 1), ("horovod", 4)):
        make_repeats(tmp_path / "shared", name, ranks, 18.0, machine={"cores": 2}, train_runtime=2.0)
    report(tmp_path / "shared")
    text = page(tmp_path / "shared")
    assert "2 cores per host for 4 threads, so the efficiency cannot exceed 0.50." in text and "only 2.0 s" in text
    assert "none, 1 rank had" not in text


def test_two_repeats_have_no_95_percent_range_and_headlines_hedge(tmp_path, capsys):
    for strategy, ranks, *speeds in (("none", 1, 9.0, 10.0), ("horovod", 1, 14.0, 16.0), ("ddp", 1, 9.5, 9.6)):
        make_repeats(tmp_path, strategy, ranks, *speeds)
    rows = report(tmp_path)
    hvd = row(rows, "side by side", "horovod", 1)
    assert [float(hvd[name]) for name in ("speedup_least", "speedup_most")] == pytest.approx([14 / 10, 16 / 9])
    tex = (tmp_path / "out/report.tex").read_text()
    caption, notes = re.findall(r"\\(?:caption\{|raggedright )(.*)", tex)
    sentence = "(efficiency 158%, lowest to highest 1.40 to 1.78), which is uncertain: efficiency above the ideal of 1,"
    sentence += " repeats more than 10% apart, only 2 runs per row."
    assert f"{sentence} Others: ddp 1.01 (101%, uncertain)." in page(tmp_path) and latex(sentence) in caption
    assert "above the ideal of 1. Check" in notes and "only 2 runs, too few" in notes and r"\label{tab:" in tex
    for text in (tex, page(tmp_path), capsys.readouterr().out):
        assert "lowest" in text and "1.40 to 1.78" in text and not re.search(r"95\s?\\?%", text)
    make_repeats(tmp_path, "none", 1, 9.0, 10.0, 11.0, 12.0)
    make_repeats(tmp_path, "ddp", 1, 9.5, 9.6, 9.7, 9.8)
    report(tmp_path)
    assert "speed-up | 95% range | lowest to highest |" in page(tmp_path), "each range has its own column"


def test_the_table_in_latex_fits_an_articles_page(tmp_path):
    kinds = [("none", 1, {}), ("dp", 1, {"devices_per_rank": 4})]
    kinds += [(name, ranks, {"nodes": ranks // 2}) for name in ("horovod", "ddp", "fsdp") for ranks in (2, 8, 16)]
    for stage in (2, 3):
        kinds += [("deepspeed", 16, {"nodes": 8, "work": {"--zero_stage": stage, "--fp16_allreduce": stage == 2}})]
    for number, (name, ranks, facts) in enumerate(kinds):
        for speed in (1234.0, 1500.0, 1600.0):
            folder = tmp_path / f"runs/{number}-{speed}"
            make_run(
                folder, name, ranks, 64, speed * facts.get("devices_per_rank", ranks), train_runtime=9999.0, **facts
            )
    report(tmp_path)
    tex = (tmp_path / "out/report.tex").read_text()
    lines = [line.removesuffix(r" \\").split(" & ") for line in tex.splitlines() if line.endswith(r" \\")]
    font = FontProperties(fname=matplotlib.get_data_path() + "/fonts/ttf/cmr10.ttf")

    def width(cell: str) -> float:
        points = 8 * 1.09  # \footnotesize in an article of 10 pt: cmr8's letters are wider than those of cmr10
        return 0.18 * PAGE if "parbox" in cell else TextPath((0, 0), cell or "0", points, prop=font).get_extents().width

    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    assert {"nodes", "GPUs"} <= {*lines[1]} and sum(widths) + 5 * (len(widths) - 1) <= PAGE


def test_latex_prints_names_unchanged():
    text = r"\{\textasciicircum{}\textasciitilde{}\textbackslash{}\} a\_b 50\% x \& \$y \#1 $<$"
    assert latex("{^~\\} a_b 50%\nx & $y #1 <") == text


def test_names_of_lines_keep_their_distance():
    assert plots.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert plots.spread([0.5, 0.5, 0.52, 0.9], 0.1) == pytest.approx([0.4067, 0.5067, 0.6067, 0.9], abs=1e-4)


@pytest.mark.parametrize(
    ("folder", "flags", "named"),
    [
        ("runs", ["--baseline", "ddp"], ["--baseline ddp", "STRATEGY:RANKS"]),
        ("runs", ["--baseline", "none:" + 5000 * "9"], ["--baseline none:"]),
        ("runs", ["--baseline", "horovod:2"], ["with a baseline of horovod:2"]),
        ("empty", [], ["empty contains no run"]),
        ("nowhere", [], ["nowhere is not a folder"]),
    ],
)
def test_refusals(tmp_path, capsys, folder, flags, named):
    checkpoint = make_run(tmp_path / "runs/none") / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "train_config.yaml").write_text("")  # a checkpoint is not a run
    assert finding.find([tmp_path, tmp_path / "runs"]) == [tmp_path / "runs/none"]
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / folder), "--out", str(tmp_path / "not-made"), *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("hvd_bert: ") and all(word in message for word in named)
    assert not (tmp_path / "not-made").exists()


SQUAD = "train_file: {}\nvalidation_file: dev.json\n"


def make_pair(folder: Path, one: str, two: str, *scores: Any, total: int = 40, **second: Any) -> None:
    """Make two runs with these settings and scores. `total`: number of the second run's questions."""
    runs = (("first", one, scores[0], 40, {}), ("jl", two, scores[1], total, second))
    for name, settings, score, count, facts in runs:
        run = make_run(folder / "runs" / name, scores=score, **facts)
        (run / "train_config.yaml").write_text(settings)
        metrics, results = run / "metrics.jsonl", run / "eval_results.json"
        if score:
            results.write_text(json.dumps(json.loads(results.read_text()) | {"total": count}))
        else:
            results.unlink(missing_ok=True)
            metrics.write_text("\n".join(metrics.read_text().splitlines()[:-1]))


@pytest.mark.parametrize(
    ("dev", "scores", "total", "expected"),
    [
        ("dev.json", ((40.0, 49.0), (100.0, 100.0)), 40, ["jl is better by 51.0 F1 (100.0 against 49.0). No interval"]),
        ("dev.json", ((60.0, 70.0), (60.0, 70.0)), 40, ["Both have F1 70."]),
        ("dev.json", ((60.0, 70.0), (60.0, 69.0)), 30, ["The F1 of first is 1.0 higher", "40 and 30 questions"]),
        ("b/dev.json", ((60.0, 70.0), (60.0, 69.0)), 40, ["The F1 of first is 1.0 higher", "dev.json and b/dev.json"]),
        ("dev.json", ((60.0, 70.0), None), 40, ["first has EM, F1, jl has none."]),
        ("dev.json", (None, None), 40, ["Neither run has one."]),
        ("dev.json", ({"accuracy": 0.7}, {"accuracy": 0.75}), 40, ["jl is better by 0.05 accuracy (0.75 against 0.7)"]),
    ],
)
def test_two_runs_begin_with_their_scores(tmp_path, capsys, dev, scores, total, expected):
    other = SQUAD.replace("dev.json", dev)
    make_pair(tmp_path, SQUAD.format("a.json"), other.format("a.json"), *scores, total=total)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    text, printed = page(tmp_path), capsys.readouterr().out
    assert all(words in text and words in printed.splitlines()[0] for words in expected)
    titles = re.findall(r"<h2[^>]*>(.*)</h2>", (tmp_path / "out/report.html").read_text())
    assert titles[:3] == ["Scores", "What differs", "Speed"]
    assert ("settings, inputs and versions are the same" in text) == (dev == "dev.json")


def test_scores_table_and_names_of_files_in_place_of_hashes(tmp_path, capsys):
    files = {"/d/a.json": 1e-4, "b.json": 2e-4}
    one, two = (f"{SQUAD.format(name)}learning_rate: {rate}\n" for name, rate in files.items())
    work = {"the training data": "0" * 12, "the tokenizer": "1" * 12}
    make_pair(tmp_path, one, two, (40.0, 49.0), (100.0, 100.0), work=work, learning_rate=2e-4)
    report(tmp_path)
    text, printed = page(tmp_path), capsys.readouterr().out
    assert "EM | 40 | 100 | -60\n" in text and "questions | 40 | 40 | +0\n" in text
    assert "the training data | a.json | b.json\n" in text
    assert "the training data is b.json, the baseline's a.json" in printed
    assert (
        "--learning_rate | 0.0001 | 0.0002\n" in text and "\nlearning rate" not in text and "--train_file" not in text
    )
    read = {"": "two different files named a.json", "bad_examples: skip\n": "a.json with other content"}
    for settings, named in read.items():
        work |= {"--bad_examples": "skip"} if settings else {}
        make_pair(tmp_path, one, SQUAD.format("a.json") + settings, None, None, work=work)
        report(tmp_path)
        assert f"the training data: {named}" in capsys.readouterr().out
        assert ("a.json (1 of 2 different files of this name)" in page(tmp_path)) == (not settings)


def test_default_folder_of_a_report(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        make_run(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    expected = {"a": "runs/a/report", "a b": "runs/a/report-with-b", "b a c": "runs/b/report-with-a-and-1-more"}
    for names, folder in expected.items():
        runs = [f"runs/{name}" for name in names.split()]
        assert main(runs) == 0 and main(runs) == (2 if len(runs) > 2 else 0), "a name of one or two runs tells which"
        assert (tmp_path / folder / "report.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert main(["runs"]) == 0 and (tmp_path / "report/report.html").exists()
    assert main(["runs"]) == 2


def test_points_that_a_sweep_skipped_are_listed_with_the_reason(tmp_path, capsys):
    make_run(tmp_path / "runs/none-1")
    make_run(tmp_path / "runs/ddp-2", "ddp", 2)
    (make_run(tmp_path / "runs/fsdp-2", "fsdp", 2) / "train_results.json").unlink()
    states = {"none-1": ("done", ""), "fsdp-2": ("failed", "rank 1: out of memory.")}
    states |= dict.fromkeys(("dp-2", "dp-4"), ("skipped", "needs GPUs"))
    points = [
        {"name": name, "strategy": name[:-2], "state": state, "reason": reason}
        for name, (state, reason) in states.items()
    ]
    (tmp_path / "runs/sweep.json").write_text(json.dumps({"same": {}, "points": points}))
    report(tmp_path)
    message = capsys.readouterr().out
    assert f"dp (dp-2, dp-4 of {tmp_path}/runs): skipped: needs GPUs." in message
    assert f"fsdp (fsdp-2 of {tmp_path}/runs): failed: rank 1: out of memory." in message
    assert "not finished" not in message


@pytest.mark.slow
def test_the_page_is_one_file_and_the_plots_are_next_to_it(tmp_path):
    for ranks in (1, 2, 4, 32):
        make_run(tmp_path / f"runs/{ranks}", "horovod", ranks, 32, 9 * ranks)
    report(tmp_path)
    panels = [(tmp_path / f"out/scaling_1_{name}.{form}") for name in plots.MEASURES for form in FORMATS]
    content = {path: path.read_bytes() for path in panels}
    marks = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert all(data.startswith(marks[path.suffix]) for path, data in content.items())
    report(tmp_path)
    assert all(path.read_bytes() == data for path, data in content.items()), "the same runs, other files"
    markup = re.sub(r"<script>.*?</script>", "", (tmp_path / "out/report.html").read_text(), flags=re.DOTALL)
    links = re.findall(r'<[^<>]*\b(?:src|href|srcset|data|action)="([^"]*)"', markup)
    assert markup.count("<img src=") == len(plots.MEASURES)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not any(word in markup for word in ("url(", "@import", "http:", "https:"))
    with Image.open(tmp_path / "out/scaling_1_speedup.png") as image:
        assert image.size[0] >= 1000 and len(set(image.convert("L").tobytes())) > 20  # the image is not blank


@pytest.mark.slow
def test_long_names_of_lines_are_below_the_axes(tmp_path):
    heights = []
    for name in ("ddp", "a strategy of my own"):
        runs = [record.read(folder) for n in (1, 2) for folder in make_repeats(tmp_path, name, n, 9.0 * n)]
        (table,) = comparison.tables(comparison.grouped(runs), None)
        with Image.open(io.BytesIO(plots.panel(table, "speedup", ["png"])["png"])) as image:
            heights.append(image.size[1])
    assert heights[0] == round(plots.HEIGHT * 300) < heights[1]


@pytest.mark.parametrize("count", [2, 11, 31])
def test_interval_equals_scipys(count):
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(count).normal(70, 2, count)
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert interval(values.tolist()) == pytest.approx(expected, abs=1e-3)


def test_repeats_of_runs(tmp_path):
    for seed, f1 in enumerate((70.0, 71.0, 72.0)):
        make_run(tmp_path / f"{seed}", seed=seed, scores=(60.0, f1))
    make_run(tmp_path / "one", "horovod", 2, scores=(1.0, 2.0))
    runs = [record.read(folder) for folder in finding.find([tmp_path])]
    grid = repeats(comparison.grouped(runs))
    assert grid is not None
    assert [row[:2] for row in grid.rows] == [["none, 1 rank", name] for name in ("EM", "F1", "last loss", "windows/s")]
    assert grid.rows[1][2:] == ["3", "71", "1", "68.52 to 73.48", "70", "72"]


def test_range_of_a_speedup_is_within_the_extremes_of_both_sides(tmp_path):
    runs = [make_repeats(tmp_path, "ddp", n, *(low + more for more in range(5))) for n, low in ((1, 8.0), (2, 18.0))]
    base, faster = (Group(tuple(map(record.read, repeats)), "ddp") for repeats in runs)
    minimum, maximum = comparison.speedup_range(base, faster) or (0, 0)
    # Reaching the extremes of both groups has a probability of 0.058 squared, below 2.5 %, so the range is narrower.
    assert 18 / 12 < minimum < 1.7 and 2.3 < maximum < 22 / 8
