"""The trainer without flags trains bert-base-uncased on SQuAD v1.1 from the hub's cache, or names remedies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import printed
from launch import TRAIN, launcher, programs, run

pytestmark = pytest.mark.integration

# A compute node without access to the hub: offline mode is not set, and no server answers.
NO_HUB = {"HF_HUB_OFFLINE": None, "HF_DATASETS_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
NO_HUB |= {"HF_HUB_CACHE": None, "HF_DATASETS_CACHE": None, "TRANSFORMERS_CACHE": None}


def test_trains_from_the_hubs_cache_into_a_dated_folder(hub_home: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    script = tmp_path / "hvd-bert"  # as pip writes it for an entry point
    script.write_text(f"#!{programs() / 'python'}\nimport sys\nfrom hvd_bert.__main__ import main\nsys.exit(main())\n")
    script.chmod(0o755)
    outcome = run([*launcher(2, "gloo"), script, "train"], empty, env=NO_HUB).expect(0)
    assert [path.name for path in empty.iterdir()] == ["runs"]
    (out,) = (empty / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", out.name)
    assert out.name in outcome.output
    results = json.loads((out / "train_results.json").read_text())
    assert (results["train_windows"], results["world_size"]) == (40, 2)
    assert len(json.loads((out / "eval_predictions.json").read_text())) == 5


def test_without_hub_and_cache_the_message_names_remedies(tmp_path: Path) -> None:
    outcome = run(TRAIN, tmp_path, env=NO_HUB | {"HF_HOME": str(tmp_path / "hf")}).expect(2)
    output = printed(outcome)
    assert "--config sample" in output and "local f" in output, outcome
    assert output.count("hvd_bert: ") == 1, outcome
    assert "Traceback" not in output, outcome
