"""Reading of unfinished, failed and damaged runs, and the page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import make_run, make_samples, text_of

from hvd_bert.storage import locks
from hvd_bert.storage.locks import acquire
from hvd_bert.tools.rendering.figures import COLOURS
from hvd_bert.tools.report import comparison, curves, run_page, setup
from hvd_bert.tools.report.__main__ import main
from hvd_bert.tools.runs import finding, record


def unfinished(folder: Path, *events: dict[str, Any]) -> Path:
    """Make the folder of an unfinished run: 20 of 40 steps are recorded. `events`: added to events.jsonl."""
    make_run(folder)
    (folder / "train_results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:20]) + '{"step": 21, "lo')  # a line that is being written
    start = {"event": "start", "train_steps": 40, "unit": "windows", "ranks": [{"rank": 0, "host": "a"}]}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, *events)))
    return folder


def page(folder: Path) -> str:
    """Run the report command. Returns the text of the page."""
    assert main([str(folder), "--out", str(folder.parent / "page"), "--overwrite"]) == 0
    return text_of(folder.parent / "page" / "report.html")


def test_a_run_in_progress(tmp_path, capsys):
    folder = unfinished(tmp_path / "run")
    with acquire(folder / ".lock", wait=False):
        found = record.read(folder)
        text = page(folder)
    assert (found.state, found.step) == ("running", 20)
    assert "step 20 of 40 (50%), about 32 s" in text and "a | 0 | -" in text and found.problems == []
    assert "Still running. At" in capsys.readouterr().out
    assert record.read(folder).state == "ended"


@pytest.mark.parametrize("other_host", [True, False])  # False: on this host, in a file system without locks
def test_a_run_whose_lock_is_not_visible_here(tmp_path, monkeypatch, other_host):
    def no_locks(path: Path) -> bool:
        raise OSError(95, "not supported")

    folder = unfinished(tmp_path / "run")
    if other_host:
        (folder / ".lock").write_text("process 7 on another-host\n")
    else:
        monkeypatch.setattr(locks, "is_held", no_locks)
    assert record.read(folder).state == "running"
    monkeypatch.setattr(record, "SILENT_S", -1.0)
    assert record.read(folder).state == "ended"


def test_a_failed_run_has_its_reason(tmp_path):
    end = {"event": "end", "message": "hvd_bert: The loss is nan at step 20."}
    folder = unfinished(tmp_path / "run", {"event": "warning", "ranks": [1, 2], "message": "odd"}, end, end)
    found, text = record.read(folder), page(folder)
    assert (found.state, found.ended) == ("ended", "The loss is nan at step 20.")
    assert found.ended in text and "last logged step 20 of 40 (50%)" in text and "ranks 1, 2: odd\n" in text
    with (folder / "events.jsonl").open("a") as file:  # as if the run was resumed and then killed
        file.write(json.dumps({"event": "start", "train_steps": 40}) + "\n")
    assert record.read(folder).ended == "" and "nan" not in page(folder)


def test_a_finished_run(tmp_path):
    folder = make_run(tmp_path / "run", "horovod", 2, scores=(60.0, 70.0))
    results = json.loads((folder / "train_results.json").read_text())
    results["ranks"] = [{"rank": n, "host": f"a100-0{n}", "local_rank": 0, "device": "cuda:0"} for n in range(2)]
    (folder / "train_results.json").write_text(json.dumps(results))
    (folder / "train_config.yaml").write_text("learning_rate: 0.001\nanswer_language: zh\nbf16: true\nold_flag: 3\n")
    make_samples(folder)
    assert "'f1': 70.0" in repr(record.read(folder)) and len(repr(record.read(folder))) < 240 + len(str(folder))
    usage = [{"step": step, "rank": n, "gpu_util_percent": 90.0 + n} for step in (1, 2) for n in range(2)]
    (folder / "gpu_usage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in usage))
    for step, best in ((20, 1.0), (40, 2.0)):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text(json.dumps({"best": {"metric": "f1", "value": best, "step": step}}))
    text = page(folder)
    assert "<mark>the red box</mark>" in (folder.parent / "page" / "report.html").read_text()
    for part in (
        "Not the red box of the shed: in the hall is the red box.\n",
        "EM 60 and F1 70 after 40 steps in 1 min 10 s on 2 ranks with horovod",
        "forward and backward | 1.44 s | 90.0 %\n",
        "rank 1 | 2 | 1 | 2 | 91 | 91 | 91 | 91\n",
        "a100-00 | 0 | cuda:0\n",
        "1 | a100-01 | 0 | cuda:0 | 101 | 90 | 5 | 2.00\n",
        "checkpoint-40 | 40\n",
        "Best f1 (zh): 2, at step 40.",  # its final scores are a later evaluation's
        "--learning_rate | 0.001 | 5e-05\n",
        "--old_flag | 3 | unknown flag\n",
        f"python -m hvd_bert.train --config {folder}/train_config.yaml --output_dir NEW_FOLDER",
    ):
        assert part in text


def test_a_run_that_only_evaluated(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "eval_results.json").write_text(json.dumps({"accuracy": 0.5, "eval_loss": 1.5}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval_accuracy": 0.5}) + "\n")
    (folder / "eval_config.yaml").write_text("do_train: false\n")
    (folder / "events.jsonl").write_text(json.dumps({"event": "start", "scores": ["accuracy"]}) + "\n")
    found, text = record.read(folder), page(folder)
    assert (found.state, found.trained, found.score("accuracy")) == ("finished", False, 0.5)
    assert "Evaluated only." in text and "accuracy0.5" in text and "eval_config.yaml" in text


def test_lines_of_steps_in_disorder_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    lines = [line | {"step": step} for step in (1, 2, 2, 1, 3, 10**400)] + [line | {"step": 4, "loss": None}]
    evaluations = [{"step": step, "eval_f1": 50.0 + step} for step in (0, 4, 3, 0)]  # 3: of the best model
    lines = [*evaluations[::-3], *lines, *evaluations[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = record.read(folder)
    assert found.steps["step"].tolist() == [1, 2, 3, 4]
    assert found.evaluations["step"].tolist() == [0, 4, 3], "a later command's evaluation is no point of the curve"
    (problem,) = found.problems
    text = page(folder)
    assert "(3)" in problem and problem in text and "nan" not in text


def test_an_evaluation_in_the_folder_of_a_training(tmp_path):
    training = {"event": "start", "train_steps": 40, "command": "python train.py", "launcher": "none"}
    ranks = {"ranks": [{"rank": rank} for rank in range(2)]}
    folder = unfinished(tmp_path / "run")
    lines = (training | ranks, {"event": "start", "command": "python -m hvd_bert.train --no_do_train"})
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(folder)
    assert "python train.py" in text and "do_train" not in text and "ranks2" in text
    assert "Each of the 2 ranks was started as:" in text


def test_the_first_line_is_warm_up_and_others_are_weighted_by_their_time(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1] |= {"windows_per_s": 4.0, "step_s": 4.0}
    rows[2] |= {"windows_per_s": 16.0, "step_s": 1.0, "exposed_comm_s": 0.5}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = record.read(folder)
    assert (run.windows_per_s, run.steps.mean("step_s"), run.exposed_share) == pytest.approx((32 / 5, 2.5, 0.25 / 2.5))
    assert "windows/s6.4\n" in page(folder)


START = '{"event": "start", "train_steps": 40, "strategy": "%s", "world_size": %d}\n'
DAMAGE = (
    ("train_results.json", None, "not finished: it has no train_results.json"),
    ("train_results.json", '{"strategy": "ddp", "wor', "train_results.json cannot be read: "),
    ("train_results.json", '{"strategy": "ddp"}', "it was written by an older version"),
    ("train_results.json", '{"work": {"a": 1}, "world_size": 0}', "train_results.json is damaged: "),
    ("metrics.jsonl", '{"step": 1, "lo\n', "metrics.jsonl: 1 damaged line(s), the first is line 1"),
    ("metrics.jsonl", '{"step": 1, "loss": null, "windows_per_s": 1, "step_s": 1}', "has a line without its loss"),
    ("metrics.jsonl", '{"step": 1, "loss": 5.0, "windows_per_s": 1, "step_s": 1}', "has 1 line(s) of steps"),
    ("events.jsonl", START % ("ddp", 2) * 2 + START % ("ddp", 4), "changed on a resume: ddp 2 None, then ddp 4 None"),
)


@pytest.mark.parametrize(("file", "text", "reason"), DAMAGE)
def test_damaged_and_unfinished_runs_are_not_compared(tmp_path, file, text, reason):
    run = make_run(tmp_path / "run", "ddp", 2)
    (run / file).write_text(text) if text else (run / file).unlink()
    assert reason in record.read(run).comparable()


Values = st.sampled_from([None, "text", -1, 0, 1e308, 10**400, True, [], [None], [{}], {}, {"a": 1}])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data(), Values)
def test_any_content_gives_a_page(tmp_path, data, value):
    def damaged(text: str) -> str:
        content = json.loads(text)
        return json.dumps(content | {data.draw(st.sampled_from(sorted(content))): value})

    folder = make_run(tmp_path / "run", scores=(1.0, 2.0))
    make_samples(folder)
    results, metrics = folder / "train_results.json", folder / "metrics.jsonl"
    results.write_text(damaged(results.read_text()))
    file = data.draw(st.sampled_from(["eval_results.json", "eval_samples.json", "events.jsonl", "gpu_usage.jsonl"]))
    contents = [value, {"eval_loss": value, "f1": value}, [{"probability": value, "f1": value, "answers": value}]]
    (folder / file).write_text(json.dumps(data.draw(st.sampled_from(contents))))
    (folder / "checkpoint-20").mkdir(exist_ok=True)
    best = damaged('{"metric": "f1", "value": 1.0, "step": 20}')
    (folder / "checkpoint-20" / "state.json").write_text(f'{{"best": {best}}}')
    rows, at = metrics.read_text().splitlines(), data.draw(st.sampled_from([0, 20, -1]))
    rows[at] = damaged(rows[at])
    metrics.write_text("\n".join(rows) + "\n")
    made = run_page.make_page(record.read(folder))
    assert made.as_html() and run_page.summary(record.read(folder))


def test_skipped_steps_are_shown_with_their_windows(tmp_path):
    names = [f"question-{number}" for number in range(10)]
    batch = [{"rank": 3, "loss": "nan", "windows": names}, {"rank": 1, "loss": "nan", "windows": ["other"]}]
    events = [{"event": "skipped_step", "step": step, "batch": []} for step in range(58)]
    skipped = {"event": "skipped_step", "step": 70, "grad_norm": "nan", "batch": batch}
    damaged = {"event": "skipped_step", "step": None, "batch": [3, {"windows": 5}]}
    text = page(unfinished(tmp_path / "run", *events, skipped, damaged))
    assert f"70 | 3 | {', '.join(names[:8])} and 2 more\n" in text and "None | - | -\n" in text
    assert "10 earlier events are not shown" in text and "\n10 | -" in text and "\n9 | -" not in text


def made(folder: Path, text: str, **results: object) -> record.Record:
    make_run(folder, **results)  # type: ignore[arg-type]
    (folder / "train_config.yaml").write_text(text)
    return record.read(folder)


def test_few_differences_are_a_row_per_run_that_repeats_share(tmp_path):
    records = [made(tmp_path / str(seed), f"seed: {seed}\noutput_dir: {seed}\n", seed=seed) for seed in range(3)]
    grid = setup.differences(records)
    assert [grid.head, grid.rows[2]] == [["run", "--seed"], [str(tmp_path / "2"), "2"]]
    texts = {f"{bf16}-{seed}": f"seed: {seed}\nbf16: {bf16}\n" for bf16 in ("true", "false") for seed in (1, 2)}
    grid = setup.differences([made(tmp_path / name, text) for name, text in texts.items()])
    assert grid.head == ["run", "--bf16"]
    assert grid.rows == [[f"{tmp_path}/true-1 and 1 more", "yes"], [f"{tmp_path}/false-1 and 1 more", "no"]]


def test_many_differences_are_a_column_per_run(tmp_path):
    first = made(tmp_path / "a", "seed: 1\nbf16: true\n")
    second = made(tmp_path / "b", "seed: 2\n", versions={"torch": "2.6.0"}, work={"the model": "other"})
    grid = setup.differences([first, second])
    assert grid.head == ["setting", str(tmp_path / "a"), str(tmp_path / "b")]
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["--seed"] == ["1", "2"] and rows["--bf16"] == ["yes", "-"]
    assert rows["torch"] == ["2.13.0", "2.6.0"] and "the model" in rows and "the training data" not in rows


MACHINE = {"processor": "AMD EPYC 7742", "cores": 64, "memory_bytes": 256 * 2**30, "gpus": 2}
SET_UP = (
    "Hardware: 2 hosts (a100-01 and a100-02), 2 GPUs per host, NVIDIA A100, 40 GiB per GPU, AMD EPYC 7742, 64 cores per"
    " host, 256 GiB of memory per host, 1 thread per rank. Software: PyTorch 2.8.0, Horovod 0.28.1, Open MPI v4.1.4,"
    " NCCL 2.27.3. Model: bert-base-uncased, 1,000,000 parameters. Data: train.json, 88,524 training windows, sequences"
    " of up to 384 tokens. Training: strategy none and horovod, world size 1 and 4, ranks connected by mpi, global"
    " batch 16, 40 steps, learning rate 5e-05, seed 42. Slurm: partition gpu, 2 tasks per node."
)


def test_the_set_up_has_the_recorded_facts(tmp_path):
    versions = {"torch": "2.8.0+cu128", "horovod": "0.28.1", "deepspeed": "0.19.8", "cuda": None, "nccl": "2.27.3"}
    facts = {"machine": MACHINE | {"gpu_memory_bytes": 40 * 2**30}, "device_name": "NVIDIA A100", "versions": versions}
    facts |= {"train_windows": 88_524, "job": {"partition": "gpu", "tasks_per_node": "2"}}
    settings = "model_name_or_path: bert-base-uncased\ntrain_file: [/data/train.json]\nmax_seq_length: 384\n"
    for name, ranks, mpi in (("none", 1, None), ("horovod", 4, "Open MPI v4.1.4")):
        folder = make_run(tmp_path / f"runs/{name}", name, ranks, nodes=ranks // 2 or 1, mpi=mpi, **facts)
        (folder / "train_config.yaml").write_text(settings)
    (tmp_path / "runs/sweep.json").write_text(json.dumps({"same": {}, "command": ["hvd-bert", "bench", "a b"]}))
    assert f"Set-up\n{SET_UP}\nhvd-bert bench 'a b'\n" in page(tmp_path / "runs")
    older = record.read(make_run(tmp_path / "older", "ddp", 2))
    start = "Hardware: 1 host (a100-01), AMD EPYC, 1 thread per rank. Software: PyTorch 2.13.0. Model: 1,000,000 param"
    assert setup.paragraph([older]).startswith(start)


def test_repeats_are_a_curve_with_a_band(tmp_path):
    for seed, loss in enumerate((5.0, 6.0, 8.0)):
        make_run(tmp_path / f"hvd-{seed}", "horovod", 2, seed=seed, loss=loss, every=10 if seed else 1)
    make_run(tmp_path / "none")
    (make_run(tmp_path / "ended", "horovod", 2) / "train_results.json").unlink()
    records = [record.read(folder) for folder in finding.find([tmp_path])]
    runs, _ = comparison.comparable(records, {})
    charts = {chart.title: chart.series for chart in curves.of_runs(records, comparison.grouped(runs))}
    none, horovod, ended = charts["Training loss"]
    assert [series.name for series in (none, horovod, ended)] == ["none, 1 rank", "horovod, 2 ranks", "ended"]
    assert list(horovod.x) == [1, 10, 20, 30, 40], "steps that all runs logged"
    assert (horovod.y[0], *(edge[0] for edge in horovod.band)) == (6, 5, 8)
    assert none.colour == 0 and horovod.colour == 1 + len(COLOURS), "as in the plots, and dashed"


def test_charts_of_two_tasks_have_their_units(tmp_path):
    for unit, score in (("windows", "exact_match"), ("images", "accuracy")):
        with (make_run(tmp_path / unit, unit=unit, scores={score: 0.5}) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 41, f"eval_{score}": 0.5}) + "\n")
    charts = curves.of_runs([record.read(tmp_path / unit) for unit in ("windows", "images")], [])
    units = {chart.title: chart.y_title for chart in charts}
    assert (units["EM"], units["accuracy"], units["Throughput"]) == ("percent", "score", "windows/s or images/s")
