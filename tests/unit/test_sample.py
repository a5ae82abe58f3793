"""The sample: reproducible, generated on first use, valid SQuAD, with unseen names in dev and a matching vocabulary."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tables import each, refused
from transformers import AutoTokenizer, BertConfig

import hvd_bert
from hvd_bert.data.sources import squad
from hvd_bert.sample import files, generate
from hvd_bert.sample.files import FILES, Expected, generated
from hvd_bert.sample.passages import THEMES, Names
from hvd_bert.storage.writing import write_once

SAMPLE = Path(hvd_bert.__file__).parent / "sample"


def _questions(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for article in json.loads(generated(name).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for row in paragraph["qas"]:
                yield article["title"], paragraph["context"], row


def test_the_generator_writes_what_is_expected(tmp_path: Path) -> None:
    generate.main(["--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "vocab.txt"}
    assert (tmp_path / "vocab.txt").read_bytes() == (SAMPLE / "vocab.txt").read_bytes(), "run the generator again"
    for name, expected in FILES.items():
        content = (tmp_path / name).read_bytes()
        assert expected == Expected(len(content), hashlib.sha256(content).hexdigest()), f"{name}: update files.py"
        assert generated(name).read_bytes() == content


@each("out", ["", "file", "/proc/sample"])
def test_the_generator_refuses_what_is_no_folder(out, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        generate.main(["--out", out])
    assert ended.value.code == 2 and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert capsys.readouterr().err.count("error: --out") == 1


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the package's folder, as in a fresh clone."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(files, "FOLDER", tmp_path / "package")
    return tmp_path / "package"


def test_file_is_generated_once_and_only_in_the_samples_folder(empty_folder: Path, tmp_path: Path) -> None:
    path = empty_folder / "dev-v1.1.json"
    assert files.located(tmp_path / "dev-v1.1.json") == tmp_path / "dev-v1.1.json"
    assert files.located(empty_folder / "other.json") == empty_folder / "other.json"
    assert list(empty_folder.iterdir()) == []
    assert files.located(path) == path and list(empty_folder.iterdir()) == [path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "content", None)  # would raise TypeError
        assert files.located(str(path)) == path
    content = path.read_bytes()
    for other in (b"of another version", content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]):
        path.write_bytes(other)
        assert len(squad.open_file(path, False).questions()) > 300
        assert path.read_bytes() == content
    assert list(empty_folder.iterdir()) == [path]


def test_several_writers_at_once(empty_folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(generated, ["dev-v1.1.json"] * 4))
    assert set(paths) == set(empty_folder.iterdir()) == {empty_folder / "dev-v1.1.json"}
    assert hashlib.sha256(paths[0].read_bytes()).hexdigest() == FILES["dev-v1.1.json"].sha256


def test_first_file_is_kept_and_hard_links_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_once(path, b"one")
    first = path.stat().st_ino
    write_once(path, b"one")
    assert path.stat().st_ino == first

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    write_once(path, b"other")
    assert path.read_bytes() == b"other" and list(tmp_path.iterdir()) == [path]


def test_read_only_package(empty_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_folder.rmdir()
    empty_folder.touch()  # stops root, too
    path = files.located(empty_folder / "dev-v1.1.json")
    assert path.parent == own_cache.parent / "sample" and path.name.endswith("-dev-v1.1.json")
    assert len(squad.open_file(empty_folder / "dev-v1.1.json", False).questions()) > 300
    monkeypatch.setenv("HVD_BERT_CACHE", str(empty_folder))
    with refused("HVD_BERT_CACHE"):
        files.located(empty_folder / "dev-v1.1.json")


def test_changed_generator_is_refused(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "content", lambda name: b"{}")
    with refused("dev-v1.1.json", FILES["dev-v1.1.json"].sha256):
        generated("dev-v1.1.json")
    assert list(empty_folder.iterdir()) == []


@each("name", FILES)
def test_file_is_valid_squad(name: str) -> None:
    rows = list(_questions(name))
    ids = [row["id"] for _, _, row in rows]
    assert len(ids) == len(set(ids)) > 300
    for title, context, row in rows:
        assert title and row["question"].endswith("?")
        assert not re.search("[{}\x01\x02\x03]", context + row["question"] + title)
        for answer in row["answers"] + row.get("plausible_answers", []):
            assert context[answer["answer_start"] :].startswith(answer["text"])
        assert bool(row["answers"]) != row.get("is_impossible", False)
    if "v2" in name:
        assert 0.28 < sum(row["is_impossible"] for _, _, row in rows) / len(rows) < 0.39


@each("version", ["1.1", "2.0"])
def test_no_composed_name_of_dev_occurs_in_train(version: str) -> None:
    train, dev = (
        " ".join(f"{title} {text} {row['question']}" for title, text, row in _questions(f"{split}-v{version}.json"))
        for split in ("train", "dev")
    )
    names = set(Names("dev").first_part)
    assert not names & set(Names("train").first_part)
    assert len(names & set(re.findall(r"\w+", dev))) > 50
    assert not names & set(re.findall(r"\w+", train))
    assert not [ship for ship in names if " " in ship and ship in train]


def _relation(question: str) -> tuple[str, int]:
    """Kind of value and number of the fact that a question asks for, from the generator's wordings."""
    for kind, relations in THEMES.relations.items():
        for number, relation in enumerate(relations):
            for before, _, after in (wording.partition("{e}") for wording in relation.questions):
                if question.startswith(before) and question.endswith(after):
                    return kind, number
    raise AssertionError(question)


def _answered(split: str) -> list[tuple[tuple[str, int], int, int]]:
    """For each question: relation, position of the answer among the passage's values of its kind, their number."""
    starts: dict[tuple[str, str], list[int]] = {}
    rows = []
    for _, context, row in _questions(f"{split}-v1.1.json"):
        relation, start = _relation(row["question"]), row["answers"][0]["answer_start"]
        candidates = starts.setdefault((context, relation[0]), [])
        candidates.append(start)
        rows.append((relation, start, candidates))
    return [(relation, sorted(candidates).index(start), len(candidates)) for relation, start, candidates in rows]


def test_kind_and_order_of_the_values_do_not_reveal_the_answer() -> None:
    """A model that sees the question, kinds of values and their order, but no sentence, is right for about a third."""
    dev = _answered("dev")
    assert sum(1 / candidates for _, _, candidates in dev) / len(dev) < 0.34
    assert max(Counter(position for _, position, _ in dev).values()) / len(dev) < 0.4
    positions: dict[tuple[str, int], Counter[int]] = {}
    for relation, position, _ in _answered("train"):
        positions.setdefault(relation, Counter())[position] += 1
    right = [positions[relation].most_common(1)[0][0] == position for relation, position, _ in dev]
    assert sum(right) / len(dev) < 0.4


def test_lengths_of_passage_and_question_do_not_reveal_the_position() -> None:
    """A model that sees only lengths can at best answer with the most common position in train."""
    places: dict[tuple[str, int, int], Counter[int]] = {}
    right = []
    for split in ("train", "dev"):
        for _, context, row in _questions(f"{split}-v1.1.json"):
            seen = _relation(row["question"])[0], len(context.split()), len(row["question"].split())
            place = len(context[: row["answers"][0]["answer_start"]].split())
            if split == "train":
                places.setdefault(seen, Counter())[place] += 1
            else:
                right.append(seen in places and places[seen].most_common(1)[0][0] == place)
    assert sum(right) / len(right) < 0.2


def test_unanswerable_question_asks_for_a_kind_of_value_in_the_passage() -> None:
    kinds: dict[str, set[str]] = {}
    for _, context, row in _questions("dev-v2.0.json"):
        kinds.setdefault(context, set()).add(_relation(row["question"])[0])
    assert set(map(len, kinds.values())) == {1}


def test_tokenizer_knows_any_text_and_splits_names_in_two() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(SAMPLE))
    assert tokenizer.is_fast and tokenizer.unk_token == "[UNK]"
    assert len(tokenizer) == BertConfig.from_pretrained(str(SAMPLE)).vocab_size
    assert "[UNK]" not in tokenizer.tokenize("Xylophones — “quoted” café & 3.5% (ß) {x} ~ zzz?")
    for split in ("train", "dev"):
        names = Names(split)
        for name in (*names.places, *names.surnames):
            pieces = tokenizer.tokenize(name)
            assert len(pieces) == 2 and pieces[0] == names.first_part[name]


@each("name", FILES)
def test_text_is_split_into_whole_words(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(SAMPLE))
    contexts = {context for _, context, _ in _questions(name)}
    pieces = {piece for context in contexts for piece in tokenizer.tokenize(context)}
    assert "[UNK]" not in pieces
    assert not [piece for piece in pieces if re.fullmatch(r"##[a-z]|[b-z]", piece)]
    assert max(len(tokenizer.tokenize(context)) for context in contexts) <= 50
