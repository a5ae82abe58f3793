"""Publishing to a stand-in for the hub: the right bytes, nothing private, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import yaml
from hub_server import TOKEN, Hub, running_hub
from safetensors.numpy import save_file
from tables import each
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  # fixtures
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from hvd_bert.config.command_line import load_yaml
from hvd_bert.tools.publish.__main__ import main

UPLOADED = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, logged in."""
    with running_hub() as running:
        for name, value in {"ENDPOINT": running.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a finished training leaves, as far as it matters here."""
    out = tmp_path / "out"
    (out / "checkpoint-3").mkdir(parents=True)
    settings = {"train_file": "/secret/train.json", "output_dir": "/secret/out", "max_seq_length": 64, "bf16": True}
    contents = {
        "train_config.yaml": yaml.safe_dump(settings), "train_results.json": "{}",
        "config.json": "{}", "metrics.jsonl": "", "README.md": "# Mine\n",
    }  # fmt: skip
    for name, content in contents.items():
        (out / name).write_text(content)
    save_file({"qa_outputs.bias": np.zeros(2, np.float32)}, out / "model.safetensors")
    return out


def test_a_training_is_published_and_loads(base, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    train(base, "--output_dir", str(out))
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        flags = ["--repo_id", "me/mine", "--private"]
        command = [sys.executable, "-m", "hvd_bert.tools.publish", str(out), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert f"Uploaded: {hub.address}/me/mine/commit/1" in done.stdout and "Not uploaded: checkpoint-3, " in done.stdout
    assert hub.created == [{"name": "mine", "organization": "me", "visibility": "private"}]
    ((branch, _, files),) = hub.commits
    assert (branch, files.keys()) == ("main", UPLOADED | {"train_config.yaml"})
    kept = {name: (out / name).read_bytes() for name in UPLOADED}
    card = (
        kept["README.md"]
        .replace(b'name = "out"', b'name = "me/mine"')
        .replace(b'Answerer("out"', b'Answerer("me/mine"')
    )
    assert card != kept["README.md"] and files["README.md"].rpartition(b"<!--")[0] == card.rpartition(b"<!--")[0]
    for name in UPLOADED - {"README.md"}:
        assert files[name] == kept[name]
    assert [name for name, content in files.items() if str(tmp_path).encode() in content] == []

    published = tmp_path / "published"
    published.mkdir()
    for name, content in files.items():
        (published / name).write_bytes(content)
    AutoTokenizer.from_pretrained(published)
    loaded = AutoModelForQuestionAnswering.from_pretrained(published).state_dict()
    trained = AutoModelForQuestionAnswering.from_pretrained(out).state_dict()
    assert all(value.equal(trained[name]) for name, value in loaded.items())
    settings = load_yaml(str(published / "train_config.yaml"))
    assert (settings["max_seq_length"], settings["train_file"]) == (64, "squad.json")
    assert "output_dir" not in settings


@each(
    ("refused", "status", "words"),
    [
        (("whoami", 401), 2, "with status 401. Log in with `hf auth login`"),
        (("commit", 403), 2, "with status 403 (Said by the stand-in). Use a token with write permission"),
        (("preupload", 404), 2, "with status 404 (Said by the stand-in). Check the name of the user"),
        (("commit", 409), 1, "with status 409 (Said by the stand-in): the repository was changed at the same time."),
    ],
)
def test_the_hub_refuses(hub, folder, capsys, refused, status, words):
    hub.refused = refused
    assert main([str(folder), "--repo_id", "me/mine"]) == status
    assert f"hvd_bert: {hub.address} refuses the upload to me/mine {words}" in capsys.readouterr().err
    assert not hub.commits


def test_what_only_the_user_can_fix_is_no_failure_of_the_network(hub, folder, capsys):
    hub.private = False
    assert main([str(folder), "--repo_id", "me/mine", "--private"]) == 2
    assert "--private: the repository me/mine exists and is public. Make it private" in capsys.readouterr().err
    hub.private = True
    hub.header_mistakes = ['"license" must be one of the known ones']
    assert main([str(folder), "--repo_id", "me/mine"]) == 2
    said = capsys.readouterr().err
    assert '"license" must be one of' in said and said.endswith("Nothing was uploaded. Fix the header of README.md.\n")
    assert not hub.commits


def test_no_token_no_network_and_offline(hub, folder, capsys, monkeypatch, tmp_path):
    publish = [str(folder), "--repo_id", "me/mine"]
    hub.shutdown()
    hub.server_close()
    assert main(publish) == 1
    assert f"The upload to {hub.address} failed (ConnectError: " in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(publish) == 2 and "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main(publish) == 2
    assert "No Hugging Face token was found: log in with `hf auth login`, or set HF_TOKEN." in capsys.readouterr().err


@each(
    ("name", "content", "words"),
    [
        *((name, None, "has no ") for name in ("train_results.json", "model.safetensors", "train_config.yaml")),
        ("model.safetensors", b"cut off", "damaged"),
        ("config.json", b"{", "damaged"),
        ("train_config.yaml", b"a: [", "ParserError: "),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(folder, name, content, words, capsys):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(content) if content else (folder / name).unlink()
    assert main([str(folder), "--repo_id", "me/mine", "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert str(folder) in said and words in said
    (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md", "train_config.yaml"])
def test_a_link_out_of_the_folder_is_refused(folder, name, tmp_path, capsys):
    inside = folder / "checkpoint-3" / name
    (folder / name).rename(inside)
    (folder / name).symlink_to(inside)
    linked = tmp_path / "link"
    linked.symlink_to(folder)
    assert main([str(linked), "--repo_id", "me/mine", "--dry_run"]) == 0
    assert "Nothing was uploaded (--dry_run)." in capsys.readouterr().out
    inside.rename(tmp_path / name)
    inside.symlink_to(tmp_path / name)
    assert main([str(folder), "--repo_id", "me/mine", "--dry_run"]) == 2
    assert f"{folder / name} is a link to {tmp_path / name}" in capsys.readouterr().err


@each("name", ["mine", "me/a mine"])
def test_wrong_names(folder, name, capsys):
    assert main([str(folder), "--repo_id", name, "--dry_run"]) == 2
    assert f"--repo_id {name}: " in capsys.readouterr().err
