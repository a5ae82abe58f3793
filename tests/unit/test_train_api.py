"""`from hvd_bert import train`: several trainings in one process; the process's state is restored after each."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import documented
import numpy as np
import pytest
import torch
from distillation import Distillation, main
from refusals import refused
from test_world import make_world
from torch.nn.functional import cross_entropy, kl_div
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert import Callback, QuestionAnswerer, train
from hvd_bert.config.command_line import parse
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_STOPPED, UserError
from hvd_bert.storage import locks
from hvd_bert.tasks.base import load_task

PROGRAM: dict[str, Any] = {"__name__": "digits"}
exec(documented.custom_task(), PROGRAM)


def start(out: Path, at_step_2: Callable[[], object] = lambda: None, **settings: Any) -> tuple[Any, list[Any]]:
    """Train the guide's task, and call `at_step_2` after step 2. Returns the run and the calls of a callback.

    A call is (method, first argument). For on_batch, the argument is the number of windows; on_log has the loss, too.
    """
    calls: list[Any] = []

    def called(name: str, first: Any, *others: Any) -> None:
        shown = {"on_log": lambda: (first, others[0]["loss"]), "on_batch": lambda: (first.num_windows,)}
        calls.append((name, *shown.get(name, lambda: (first,))()))
        if (name, first) == ("on_step", 2):
            at_step_2()

    methods = {name: lambda _, *given, name=name: called(name, *given) for name in vars(Callback) if name[:3] == "on_"}
    recorder = type("Recorder", (Callback,), methods)()
    settings = {"max_steps": 4, "strategy": "none", "deterministic": True, "num_threads": 1} | settings
    run = train(task=PROGRAM["Digits"], output_dir=out, eval_strategy="no", callbacks=[recorder], **settings)
    return run, calls


def process_state() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    logs = [[*logging.getLogger(name).handlers] for name in (None, "hvd_bert")]
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    torchs = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]
    torchs += [torch.backends.cuda.cudnn_sdp_enabled(), torch.utils.deterministic.fill_uninitialized_memory]
    return [handlers, logs, numbers, torchs, dict(os.environ), sys.stdout, sys.stderr]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the callback's calls in a training without interruption."""
    return start(tmp_path_factory.mktemp("whole") / "run")[1]


def test_trainings_in_a_row_are_equal_and_the_process_is_restored(tmp_path: Path, whole: list[Any]) -> None:
    before = process_state()
    run, calls = start(tmp_path / "first")
    assert process_state() == before
    assert (
        str(tmp_path / "first") in repr(run)
        and "'eval_loss'" in repr(run)
        and len(repr(run)) < 240 + len(str(tmp_path))
    )
    names = " ".join(name.removeprefix("on_") for name, *_ in calls)
    assert names == "start batch step log batch step batch step batch step log save evaluate end"
    assert calls[-1][1] is run
    assert run.scores["accuracy"] and (run.output_dir / "train_results.json").exists()
    locks.acquire(run.output_dir / locks.LOCK, wait=False).release()
    assert whole[1:-1] == calls[1:-1]


def test_the_callback_for_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    names = ("start_run", "log_params", "log_metrics", "log_artifact", "end_run")  # a stub: MLflow is not installed
    mlflow = SimpleNamespace(**{name: lambda *given, name=name: calls.append((name, *given)) for name in names})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    from log_to_mlflow import MLflow

    train(task=PROGRAM["Digits"], output_dir=tmp_path, strategy="none", max_steps=2, callbacks=[MLflow()])
    assert [name for name, *_ in calls] == ["start_run", "log_params", *["log_metrics"] * 3, "log_artifact", "end_run"]
    assert calls[1][1]["max_steps"] == 2 and calls[5][1].exists()
    assert [step for *_, step in calls[2:5]] == [1, 2, 2] and "loss" in calls[2][1] and "accuracy" in calls[4][1]


def test_errors_are_raised_and_the_run_resumes(tmp_path: Path, whole: list[Any]) -> None:
    before = process_state()
    with pytest.raises(ZeroDivisionError) as failed:
        start(tmp_path / "run", lambda: 1 / 0)
    assert failed.tb  # still referenced, as in a notebook; its frames hold the world
    with pytest.raises(UserError) as stopped:  # requested in step 2, agreed by all ranks in step 3
        start(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.value.status == EXIT_STOPPED
    assert start(tmp_path / "run")[1][1:-1] == whole[8:-1]
    for settings, named in (({"max_step": 3}, "did you mean max_steps?"), ({"max_steps": "three"}, "three")):
        with refused(named) as mistake:
            start(tmp_path / "none", **settings)
        assert type(mistake.value) is UserError and mistake.value.status == EXIT_BAD_INPUT
    assert process_state() == before


def test_forked_child_of_a_process_that_has_trained_is_refused(tmp_path: Path, whole: list[Any]) -> None:
    child = os.fork()
    if child == 0:
        try:
            with refused("train()", "spawn"):
                start(tmp_path / "child")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and not (tmp_path / "child").exists()


@pytest.mark.parametrize("by", ["a callback", "a callback, in the same folder", "another thread"])
def test_training_inside_another_training_is_refused_without_effect(tmp_path: Path, whole: list[Any], by: str) -> None:
    before = process_state()

    def inner() -> None:
        seen = process_state()
        with refused("train()"):
            start(tmp_path / ("run" if "same" in by else "inner"), overwrite_output_dir=True)
        assert process_state() == seen

    with ThreadPoolExecutor(1) as thread:
        _, calls = start(tmp_path / "run", (lambda: thread.submit(inner).result()) if "thread" in by else inner)
    assert calls[1:-1] == whole[1:-1] and not (tmp_path / "inner").exists()
    assert process_state() == before


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"output_dir": b"x"}, ["output_dir b'x'", "str"]),
        ({"bf16": np.ones((2, 2))}, ["bf16 array", "bool"]),
        ({"train_file": ["a.json", b"b.json"]}, ["train_file ['a.json', b'b.json']", "str"]),
        ({"task": 5}, ["task", "'5'"]),
        ({"callbacks": [5]}, ["callbacks [5]", "Callback"]),
        ({"callbacks": (each for each in [Callback()])}, ["callbacks <generator", "Sequence"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_a_wrong_type_are_refused(tmp_path, monkeypatch, argument, named):
    monkeypatch.chdir(tmp_path)
    with refused(*named):
        train(**{"task": PROGRAM["Digits"], "output_dir": "out", "strategy": "none", "max_steps": 1} | argument)
    assert not [*tmp_path.iterdir()]


def test_arguments_may_be_texts_numpys_numbers_and_paths(tmp_path: Path, whole: list[Any]) -> None:
    settings = {"max_steps": "4", "learning_rate": "5e-5", "adam_epsilon": np.float64(1e-8), "seed": np.int64(42)}
    switches = {"bf16": np.bool_(False), "fp16": 0, "tf32": "no", "do_train": 1, "eval_steps": None, "weight_decay": 0}
    _, calls = start(tmp_path / "others", **settings, **switches)
    assert calls[1:-1] == whole[1:-1]


@pytest.mark.parametrize("where", ["notebook", "another handler"])
def test_signals_are_left_to_an_interactive_program(tmp_path, monkeypatch, capsys, where):
    if where == "notebook":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    seen: list[Any] = []
    start(tmp_path, lambda: seen.append(process_state()[0]))
    assert seen == [process_state()[0]]
    assert capsys.readouterr().out.count("SIGTERM are left to this program") == 1


def test_training_in_another_thread_than_the_main_thread(tmp_path: Path, whole: list[Any]) -> None:
    before = process_state()
    with ThreadPoolExecutor(1) as thread:
        _, calls = thread.submit(start, tmp_path / "thread").result()
        with pytest.raises(ZeroDivisionError):
            thread.submit(start, tmp_path / "failing", lambda: 1 / 0).result()
    assert process_state() == before
    assert calls[1:-1] == whole[1:-1]


def test_student_of_a_teacher_is_an_ordinary_model(
    tmp_path, tokenizer, make_tokenizer, make_questions, write_squad, monkeypatch
):
    name, file = str(tmp_path / "teacher"), write_squad(make_questions(6))
    monkeypatch.setattr(Distillation, "teacher_name", name)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), initializer_range=1.0, **shape)
    teacher = BertForQuestionAnswering(config).eval()
    for part in (teacher, tokenizer):
        part.save_pretrained(name)
    words = [f"config_name={name}", f"train_file={file}", f"validation_file={file}", "max_seq_length=64", "dropout=0"]
    words += ["doc_stride=8", "strategy=none", "num_threads=1", "max_steps=2", "global_batch=6"]

    for padding in ("none", "longest"):
        task = load_task(parse([f"--{word}" for word in (*words, f"padding={padding}")]), make_world(), Distillation)
        losses = task.losses(task.model, task.batch(np.arange(6)))
        student, table = BertForQuestionAnswering(config).eval(), task.train.windows
        student.load_state_dict(task.model.state_dict())
        for window, loss in enumerate(losses):
            ids = torch.tensor(table.lists("input_ids", [window])[0])[None].long()
            types = (torch.arange(ids.shape[1]) >= table.column("context_start")[window])[None].long()
            expected = 0.0
            for side, position in (("start", "start_position"), ("end", "end_position")):
                own, others = (model(ids, token_type_ids=types)[f"{side}_logits"] for model in (student, teacher))
                answer = torch.tensor([table.column(position)[window]]).long()
                soft = kl_div((own / 2).log_softmax(-1), (others / 2).softmax(-1), reduction="sum")
                expected += 0.25 * cross_entropy(own, answer) + 0.25 * 2**2 * soft
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        losses.sum().backward()
        assert all(weights.grad is None for weights in task.teacher.parameters())

    main(name, *words, f"output_dir={tmp_path / 'student'}")
    qa = QuestionAnswerer(tmp_path / "student")
    assert qa.model.state_dict().keys() == teacher.state_dict().keys()
    evaluated = json.loads((tmp_path / "student" / "eval_predictions.json").read_text())
    assert [answer.text for answer in qa.answers(task.dev.questions)] == [*evaluated.values()]
    learned = json.loads((tmp_path / "student" / "train_results.json").read_text())["work"]
    assert {"the teacher", "the distillation"} < learned.keys() and learned["--task"] == "question-answering"

    make_tokenizer("box").save_pretrained(tmp_path / "other")
    with refused(f"tokenizer_name={name}", tmp_path / "other"):
        main(name, *words, f"tokenizer_name={tmp_path / 'other'}", f"output_dir={tmp_path / 'refused'}")
    with refused("TEACHER"):
        main()
    with refused("teacher 's3://b/teacher'"):
        main("s3://b/teacher", *words)
    with refused("bf16", "NAME=VALUE"):
        main(name, "seed=1", "bf16")


def test_words_of_the_ray_example_are_checked(capsys):
    ray_train = pytest.importorskip("ray_train")
    for word in ("seed", "output_dir=s3://b/run"):
        with pytest.raises(SystemExit):
            ray_train.main("2", word)
        assert repr(word.partition("=")[2] or word) in capsys.readouterr().err
