"""The doctor's --model: a model that could not be trained is a failure, on one rank too."""

from __future__ import annotations

import json

import pytest

from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import World
from hvd_bert.tools.doctor import __main__ as command
from hvd_bert.tools.doctor import diagnosis
from hvd_bert.tools.doctor.report import OK, Line, Report


@pytest.mark.parametrize(
    ("config", "flags", "found", "verdict"),
    [
        (None, [], "'NAME' cannot be loaded (no such folder)", "Not ready: Model."),
        (None, ["--size", "1"], "'NAME' cannot be loaded (no such folder)", "Not ready: Model."),
        ({"model_type": "gpt2"}, [], "NAME is a gpt2 model", "Not ready: Model."),
        ({"model_type": "bert", "num_hidden_layers": 10**6}, [], "num_hidden_layers 1000000", "Not ready: Model."),
        ({"model_type": "bert"}, [], "NAME, 435.6 MB of gradients", "Ready: a training would start here."),
    ],
)
def test_model(monkeypatch, capsys, tmp_path, config, flags, found, verdict):
    monkeypatch.setattr(diagnosis.checks, "host_lines", lambda *_: [Line("Python", OK, "3.11")])
    monkeypatch.setattr(diagnosis, "rank_lines", lambda *_: [])
    monkeypatch.setattr(diagnosis.HorovodWorld, "join", staticmethod(World))
    folder = tmp_path / "model"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    parsed = command._parse(["--model", str(folder), *flags])
    status = diagnosis.diagnose(parsed, Launcher("none", None, None), Report(as_json=False, shown=True))
    output = " ".join(capsys.readouterr().out.split())
    assert " Model " in output and found.replace("NAME", str(folder)) in output
    assert output.endswith(verdict)
    assert status == (0 if verdict.startswith("Ready") else 2)
