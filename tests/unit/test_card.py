"""The model card of a trained folder: true, complete, without private paths, and never in place of a user's file."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import documented
import export_onnx
import numpy as np
import pytest
from huggingface_hub import ModelCard
from test_text_classification import made, saved, workdir  # noqa: F401  # a fixture
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  # fixtures
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS
from hvd_bert.output import card, public


def last_code_block(content: str, language: str) -> str:
    """The last code block of a language."""
    return re.findall(rf"```{language}\n(.*?)```", content, re.DOTALL)[-1]


def printed_by(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the card's program prints next to the model's folder."""
    monkeypatch.chdir(folder.parent)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "card", "exec"), {})
    return output.getvalue()


class Hub(BaseHTTPRequestHandler):
    """Answers `hf upload` as the hub does, and keeps the files in the server's `uploaded`."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://{self.headers['Host']}/USER/NAME"
        answer: dict[str, Any] = {"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1"}
        if self.path == "/api/models/USER/NAME/preupload/main":
            paths = [file["path"] for file in json.loads(content)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        if self.path == "/api/models/USER/NAME/commit/main":
            files = [line["value"] for line in map(json.loads, content.splitlines()) if line["key"] == "file"]
            self.server.uploaded = {file["path"]: base64.b64decode(file["content"]) for file in files}  # type: ignore
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def upload(folder: Path) -> dict[str, bytes]:
    """What the guide's command uploads from a trained folder, by name."""
    fence, _ = documented.fences("docs/guides/sharing.md")
    command = fence.commands[0].replace("runs/mine", folder.name)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_a", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(shlex.split(command), cwd=folder.parent, env=os.environ | environ, timeout=100)
        server.shutdown()
    assert done.returncode == 0
    return server.uploaded  # type: ignore


def training_results(**changes: Any) -> dict[str, Any]:
    """What train_results.json holds of a training."""
    results = {
        "scores": ["accuracy"],
        "strategy": "ddp",
        "unit": "images",
        "train_windows": 1500,
        "global_batch": 16,
        "devices_per_rank": 1,
        "train_steps": 200,
        "steps_per_epoch": 94,
        "learning_rate": 1e-3,
        "warmup_steps": 20.0,
        "world_size": 2,
        "hosts": ["secret-01", "secret-02"],
        "precision": "fp32",
        "seed": 42,
        "train_runtime": 3725.4,
        "train_samples_per_second": 12.5,
        "device_name": "A processor",
        "versions": {"torch": "2", "cuda": None},
        "from_hub": {},
    }
    return results | changes


def test_card_of_a_training(base, tmp_path, monkeypatch):  # noqa: F811
    train(base, "--output_dir", str(tmp_path / "out"))
    content = (tmp_path / "out" / "README.md").read_text()
    found = ModelCard(content).data
    scores = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert (found.library_name, found.pipeline_tag) == ("transformers", "question-answering")
    assert (found.base_model, found.license, found.language, found.datasets) == (None, None, None, None)
    assert {result.metric_type: result.metric_value for result in found.eval_results} == {
        name: scores[name] for name in ("exact_match", "f1")
    }
    assert {result.dataset_name for result in found.eval_results} == {"squad.json"}
    uploaded = upload(tmp_path / "out")
    files = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert uploaded == {name: (tmp_path / "out" / name).read_bytes() for name in files}
    for name, shown in uploaded.items():
        assert str(tmp_path).encode() not in shown and socket.gethostname().encode() not in shown, name

    # The command is that of the same training, from the folder of the files; the code runs.
    monkeypatch.chdir(tmp_path)
    again = parse(shlex.split(last_code_block(content, "bash").replace("\\\n", ""))[3:]).as_flat()
    config = parse(base).as_flat()
    paths = ("config_name", "train_file", "validation_file")
    shown = {name: Path(value).name if name in paths else value for name, value in config.items() if value}
    assert {name: again[name] for name in shown} == shown | {"num_threads": None}
    assert printed_by(last_code_block(content, "python"), tmp_path / "out", monkeypatch).endswith("\n")


def test_an_onnx_file_computes_the_models_logits(tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="needs env/setup.sh --dev")
    from onnx.reference import ReferenceEvaluator

    monkeypatch.chdir(tmp_path)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **size)).eval()
    model.save_pretrained("runs/mine")
    tokenizer.save_pretrained("runs/mine")
    export_onnx.main("runs/mine", "model.onnx")
    questions, passages = ["Who?", "Where is the red box?", "What?"], ["Ada.", "It is in the north of the town.", "A."]
    inputs = tokenizer(questions, passages, padding=True, return_token_type_ids=True, return_tensors="pt")
    found = ReferenceEvaluator("model.onnx").run(None, {name: values.numpy() for name, values in inputs.items()})
    for logits, expected in zip(found, model(**inputs).to_tuple(), strict=True):
        np.testing.assert_allclose(logits, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", [None, "notes.md", "missing.md"])
def test_a_users_card_stays(tmp_path, caplog, target):
    path, settings = tmp_path / "README.md", parse(["--task", "digits:Digits"]).as_flat()
    if target:
        (tmp_path / "notes.md").write_text("mine")
        path.symlink_to(target)
    else:
        path.write_text("mine")
    with caplog.at_level("INFO", "hvd_bert"):
        card.write(tmp_path, settings, training_results(), {})
    assert f"{path} exists and is kept" in caplog.text and path.is_symlink() == bool(target)
    assert not path.exists() or path.read_text() == "mine"


def test_card_of_a_classification(workdir, monkeypatch):  # noqa: F811
    task, scores = made(), {"accuracy": 0.5, "f1": float("nan"), "matthews_correlation": 0.1, "eval_loss": 1.0}
    out, settings = workdir / saved(task), task.config.as_flat() | {"train_file": str(workdir / "a|b`.jsonl")}
    card.write(out, settings, training_results(scores=["accuracy", "f1", "matthews_correlation"], unit="texts"), scores)
    content = (out / "README.md").read_text()
    found = ModelCard(content).data
    assert found.pipeline_tag == "text-classification" and found.metrics == ["accuracy", "matthews_correlation"]
    assert "`text_classification:TextClassification`" in content and "| `f1`" not in content
    assert r"Trained on `a\|b'.jsonl`: 1,500 texts." in content and "are in percent" not in content
    (answer,) = ast.literal_eval(printed_by(last_code_block(content, "python"), out, monkeypatch))
    assert answer["label"] in ("maybe", "no", "yes") and 1 / 3 <= answer["score"] <= 1


def test_card_of_an_own_task_and_a_model_that_is_not_transformers(tmp_path):
    (tmp_path / "numbers").mkdir()  # data that the task itself reads from there
    flags = ["--max_steps", "200", "--output_dir", "/secret/runs", "--dataset_name", f"{tmp_path}/numbers"]
    settings = parse(["--task", "digits:Digits", *flags]).as_flat()
    results = training_results(from_hub=public.from_hub(settings))
    content = card.text(tmp_path, settings, results, {"accuracy": 0.97})
    found = ModelCard(content).data
    assert (found.library_name, found.pipeline_tag, found.metrics) == (None, None, ["accuracy"])
    assert "```python" not in content and "load_state_dict" in content and "secret" not in content
    assert str(tmp_path) not in content and found.datasets is None
    assert found.base_model is None and "bert-base-uncased" not in content
    assert "A launcher started it on 2 ranks." in content and "| Time | 3,725.4 s, " in content


def test_data_set_of_an_own_task(tmp_path):
    settings = parse(["--task", "a:A", "--dataset_name", "nyu-mll/glue", "--dataset_config_name", "b/c"]).as_flat()
    results = training_results(from_hub=public.from_hub(settings))
    content = card.text(tmp_path, settings, results, {"accuracy": 0.5})
    (result,) = ModelCard(content).data.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("nyu-mll/glue", "b/c", None)
    assert "Evaluated on `nyu-mll/glue`, configuration `b/c`." in content, "it is no path; the task chooses the split"


def test_names_on_the_hub_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--dataset_name", "rajpurkar/squad_v2", "--tokenizer_name", "me/mine", "--model_revision", "refs/pr/1"]
    settings = parse(["--model_name_or_path", "google-bert/bert-base-uncased", *flags]).as_flat()
    hub = public.from_hub(settings)
    assert hub == {
        "model_name_or_path": "google-bert/bert-base-uncased",
        "tokenizer_name": "me/mine",
        "dataset_name": "rajpurkar/squad_v2",
    }
    shown = public.public_settings(settings | {"cache_dir": "/secret", "train_file": "/secret/a.json"}, hub)
    assert "/secret" not in str(shown) and shown["train_file"] == "a.json" and shown["model_revision"] == "refs/pr/1"
    paths = {name: "/secret/x" for name in FLAGS.keys() - public.NO_PATHS}  # also of flags that are added later
    assert "/secret" not in str(public.public_settings(paths, hub))
    found = ModelCard(card.text(tmp_path, settings, training_results(from_hub=hub), {"accuracy": 1})).data
    assert (found.base_model, found.datasets) == ("google-bert/bert-base-uncased", "rajpurkar/squad_v2")
    assert {(result.dataset_type, result.dataset_split) for result in found.eval_results} == {
        ("rajpurkar/squad_v2", "validation")
    }
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}')
    assert "hvd_bert returns an empty text." in card.text(tmp_path, settings, training_results(from_hub=hub), {})
    (tmp_path / "me" / "mine").mkdir(parents=True)  # a folder with the name of one on the hub is what is loaded
    hub = public.from_hub(settings)
    assert "tokenizer_name" not in hub
    assert public.public_settings(settings, hub)["tokenizer_name"] == "mine"
