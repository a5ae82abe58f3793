"""Fixtures for all tests: a tiny tokenizer, generated questions, and files and caches made of them."""

from __future__ import annotations

import json
import multiprocessing
import signal
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from hvd_bert.data.sources.squad import Question
from hvd_bert.distributed import events

REPOSITORY = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("loaded", deadline=None)  # a test may be slow on a loaded machine
hypothesis.settings.load_profile("loaded")


def pytest_configure() -> None:
    # A shell ignores SIGINT for background commands, and nohup ignores SIGHUP. Child processes would inherit this. They
    # do not inherit handlers, so set handlers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(autouse=True)
def signal_handlers_are_restored() -> Iterator[None]:
    """Restore signal handlers after each test.

    A training that a signal has stopped ignores this signal, and the processes of later tests would inherit that.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def runs_are_ended() -> Iterator[None]:
    """End the record of events after each test. Otherwise, a failed test's run would record later tests' warnings."""
    yield
    events.end()


@pytest.fixture(autouse=True)
def child_processes_end_with_their_test() -> Iterator[None]:
    """Kill the child processes that a test has started by multiprocessing. processes.py kills other processes."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test, and the commands that it starts, a separate cache. Returns the folder of cached windows."""
    monkeypatch.setenv("HVD_BERT_CACHE", str(tmp_path / "hvd_bert_cache"))
    return tmp_path / "hvd_bert_cache" / "windows"


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(*words) -> a fast BERT tokenizer that knows these words and each ASCII character."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(*words: str) -> Any:
        characters = string.ascii_lowercase + string.digits + string.punctuation
        inner = [f"##{character}" for character in characters]
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *inner, *words]
        vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
        backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", model_max_length=512, **special)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    """A tokenizer that knows a few words and splits all other words into characters."""
    return make_tokenizer("the", "what", "colour", "is", "box", "red", "green", "##s", "in", "of", "?")


@pytest.fixture(scope="session")
def make_questions() -> Callable[..., list[Question]]:
    """make_questions(n, unanswered_every=0) -> n small questions, each about a separate passage."""

    def make(count: int, unanswered_every: int = 0) -> list[Question]:
        colours = ("red", "green", "blue", "pale grey")
        questions = []
        for number in range(count):
            colour = colours[number % len(colours)]
            context = f"Box {number} is in the hall. The colour of box {number} is {colour}, as before."
            no_answer = unanswered_every and number % unanswered_every == 0
            answers = ((), ()) if no_answer else ((colour,), (context.index(colour),))
            asked = f"What is the colour of box {number}?"
            questions.append(Question(f"q{number}", f"Boxes {number // 5}", context, asked, *answers))
        return questions

    return make


@pytest.fixture(scope="session")
def to_squad() -> Callable[[Sequence[Question]], dict[str, Any]]:
    """to_squad(questions) -> SQuAD's JSON: articles, their paragraphs, and the paragraphs' questions."""

    def convert(questions: Sequence[Question]) -> dict[str, Any]:
        articles: dict[str, dict[str, list[Any]]] = {}
        for question in questions:
            answers = [
                {"text": text, "answer_start": start}
                for text, start in zip(question.answer_texts, question.answer_starts, strict=True)
            ]
            entry: dict[str, Any] = {"id": question.id, "question": question.question, "answers": answers}
            if not answers:
                entry["is_impossible"] = True
            articles.setdefault(question.title, {}).setdefault(question.context, []).append(entry)
        data = [
            {"title": title, "paragraphs": [{"context": c, "qas": qas} for c, qas in paragraphs.items()]}
            for title, paragraphs in articles.items()
        ]
        return {"version": "1.1", "data": data}

    return convert


@pytest.fixture
def write_squad(
    tmp_path: Path, to_squad: Callable[[Sequence[Question]], dict[str, Any]]
) -> Callable[[Sequence[Question], str], Path]:
    """write_squad(questions, name) -> the path of a new SQuAD file."""

    def write(questions: Sequence[Question], name: str = "squad.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(to_squad(questions)), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def to_rows() -> Callable[[Sequence[Question]], list[dict[str, Any]]]:
    """to_rows(questions) -> flat rows with the columns of SQuAD on the hub."""

    def convert(questions: Sequence[Question]) -> list[dict[str, Any]]:
        return [
            {"id": q.id, "title": q.title, "context": q.context, "question": q.question}
            | {"answers": {"text": list(q.answer_texts), "answer_start": list(q.answer_starts)}}
            for q in questions
        ]

    return convert


@pytest.fixture(scope="session")
def write_hub_cache(to_rows: Callable[[Sequence[Question]], list[dict[str, Any]]]) -> Callable[..., None]:
    """write_hub_cache(folder, {"train": questions, ...}): write these splits to `folder`, a cache of `datasets`.

    With `features`, the splits are lists of rows instead of questions.
    """

    def write(
        folder: Path,
        splits: dict[str, Sequence[Any]],
        name: str = "rajpurkar/squad",
        config: str = "plain_text",
        features: Any = None,
    ) -> None:
        import datasets
        from datasets.arrow_writer import ArrowWriter

        if features is None:
            splits = {split: to_rows(questions) for split, questions in splits.items()}
            text, number = datasets.Value("string"), datasets.Value("int32")
            answers = {"text": datasets.List(text), "answer_start": datasets.List(number)}
            columns = dict.fromkeys(("id", "title", "context", "question"), text)
            features = datasets.Features({**columns, "answers": answers})
        short = name.split("/")[-1]
        target = folder / name.replace("/", "___") / config / "0.0.0" / "0123456789abcdef"
        target.mkdir(parents=True)
        infos = datasets.SplitDict(dataset_name=short)
        for split, rows in splits.items():
            with ArrowWriter(features=features, path=str(target / f"{short}-{split}.arrow")) as writer:
                for row in rows:
                    writer.write(row)
                num_examples, num_bytes = writer.finalize()
            infos.add(datasets.SplitInfo(split, num_bytes, num_examples, dataset_name=short))
        names = {"builder_name": "parquet", "dataset_name": short, "config_name": config, "version": "0.0.0"}
        datasets.DatasetInfo(features=features, splits=infos, **names).write_to_directory(str(target))

    return write


@pytest.fixture(scope="session")
def hub_home(write_hub_cache: Callable[..., None]) -> Path:
    """The commands' $HF_HOME, as if squad, squad_v2 (40 + 5 questions each) and two models had been downloaded.

    The models bert-base-uncased and all-MiniLM-L6-v2 are the same tiny BERT with new weights.
    """
    from commands import TINY
    from launch import hub_folder
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    from hvd_bert.data.sources import squad

    sample = REPOSITORY / "hvd_bert" / "sample"
    home = hub_folder()
    splits = {
        split: squad.open_file(sample / f"{file}-v1.1.json.gz", False).questions()[:count]
        for split, file, count in (("train", "train", 40), ("validation", "dev", 5))
    }
    for name in ("rajpurkar/squad", "rajpurkar/squad_v2"):
        write_hub_cache(home / "datasets", splits, name)
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = home / "hub" / "models--bert-base-uncased"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    tokenizer = AutoTokenizer.from_pretrained(sample, model_max_length=512)
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **TINY))
    for part in (tokenizer, model):
        part.save_pretrained(root / "snapshots" / commit)
    (home / "hub" / "models--sentence-transformers--all-MiniLM-L6-v2").symlink_to(root)
    return home
