"""`QuestionAnswerer`: a trained model that answers questions, for Python programs and for `hvd-bert predict`.

Questions are answered in blocks, which bounds memory use. Blocks depend only on the questions, so the answers do not
depend on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import torch

from hvd_bert.config.arguments import check_types
from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.data import ANSWERING, QUESTION_ANSWERING, DataArguments, ModelArguments
from hvd_bert.config.flag import require
from hvd_bert.config.parser import checked_path
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.collate import Collator
from hvd_bert.data.counts import FileCounts, WindowCounts
from hvd_bert.data.sources.questions import text_mistake
from hvd_bert.data.sources.squad import Question
from hvd_bert.data.window_cutting import WindowOptions, WindowTokenizer
from hvd_bert.data.window_table import check_lengths, in_memory
from hvd_bert.errors import UserError, as_user_error, log
from hvd_bert.evaluation.evaluator import batch_outputs, span_options, span_outputs, window_logits
from hvd_bert.evaluation.postprocess import Answer, SpanOptions, answers_of
from hvd_bert.model.bert import load_model
from hvd_bert.model.families import check_precision, find_family, max_tokens
from hvd_bert.model.layers import place
from hvd_bert.model.precision import AUTOCAST
from hvd_bert.tasks.tokenizer import load_tokenizer

Texts = str | Sequence[str]
BATCH_SIZE = 8
# Limits of a block: number of questions, and total characters of their contexts.
BLOCK_QUESTIONS, BLOCK_CHARACTERS = 64, 2**18


class QuestionAnswerer:
    """Answers questions with a trained model from an output folder, a checkpoint or the hub.

        qa = QuestionAnswerer("runs/mine")
        answer = qa(question="Where was Ada born?", context="Ada was born in London.")
        answer.text, answer.start, answer.end, answer.score

    Default settings are those of the training (train_config.yaml). Without that file, `max_seq_length` is 384 or the
    model's limit, if that is less. `device`: the first GPU by default, or the CPU if there is no GPU. `precision`:
    "fp32", "bf16" or "fp16". `batch_size`: windows per forward pass.

    Raises UserError, a subclass of ValueError, for an unusable model or setting.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | int | torch.device | None = None,
        precision: str = "fp32",
        batch_size: int = BATCH_SIZE,
        max_seq_length: int | None = None,
        doc_stride: int | None = None,
        n_best_size: int | None = None,
        max_answer_length: int | None = None,
        version_2_with_negative: bool | None = None,
        null_score_diff_threshold: float | None = None,
    ) -> None:
        arguments = dict(locals())
        check_types(arguments, get_type_hints(QuestionAnswerer.__init__) | {"model": str, "device": Any})
        name = checked_path("model", os.fspath(model))
        require(precision in AUTOCAST, f"precision {precision!r}: choose from {', '.join(AUTOCAST)}.")
        require(batch_size >= 1, f"batch_size {batch_size}: must be at least 1.")
        settings = _settings(name, {setting: arguments[setting] for setting in ANSWERING})
        args = ModelArguments(model_name_or_path=name)
        tokenizer = load_tokenizer(args)
        with torch.random.fork_rng(devices=[]):  # loading seeds torch's CPU generator; restore the caller's state
            self.model = load_model(args, tokenizer, settings.get("max_seq_length", 1), seed=0, needs_head=True).eval()
        check_precision(self.model.config, precision)
        longest = int(min(384, max_tokens(self.model.config), tokenizer.model_max_length))
        length = settings.setdefault("max_seq_length", longest)
        settings.setdefault("doc_stride", min(128, length // 3))
        data = DataArguments(**settings)
        self.window_options = WindowOptions(data.max_seq_length, data.doc_stride)
        self.span_options = span_options(data)
        if threshold := describe_threshold(name, self.span_options):
            log.info("%s", threshold)
        check_lengths(self.window_options, tokenizer)
        with as_user_error(lambda reason: f"device {str(device)!r} cannot be used ({reason}). Name another."):
            self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
            require(self.device.type != "meta", "device 'meta' has no data, so it cannot answer. Name another.")
            place(self.model, self.device)
        self.precision, self.batch_size = precision, batch_size
        self.tokenizer = tokenizer
        self._window_tokenizer = WindowTokenizer(tokenizer, self.window_options)
        self.counts = WindowCounts()  # of all questions that were answered
        self._told: set[str] = set()  # kinds of warnings that were logged

    def __call__(
        self,
        question: str | Mapping[str, str] | Sequence[str | Mapping[str, str]],
        context: Texts | None = None,
        *,
        top_k: int | None = None,
    ) -> Any:
        """Answer one question, or a list of questions. Returns an Answer, or a list in the order of the questions.

        If one argument is a list, the other may be a single text, which is then used for each element. Without
        `context`, `question` is `{"question": ..., "context": ...}` or a list of such dicts. With `top_k`, each Answer
        is replaced by a list of the best Candidates with different texts, at most `top_k`.
        """
        check_types(locals(), get_type_hints(QuestionAnswerer.__call__))
        require(top_k is None or top_k >= 1, f"top_k {top_k}: must be at least 1.")
        single = isinstance(question, Mapping) or (isinstance(question, str) and isinstance(context, str))
        options = self.span_options
        if top_k is not None:
            options = replace(options, listed=top_k, distinct_texts=True)
        answers = list(self.answers(_questions(question, context), options))
        found = answers if top_k is None else [list(answer.nbest[:top_k]) for answer in answers]
        return found[0] if single else found

    def answers(self, questions: Iterable[Question], options: SpanOptions | None = None) -> Iterator[Answer]:
        """Yield the answers in the order of the questions. Does not check the questions' texts.

        Logs each kind of warning about the questions once.
        """
        for block in blocks(questions):
            yield from self.answer_block(block, options)
        FileCounts("the questions", "prediction", self.counts).warn(self._told)

    def answer_block(self, block: Sequence[Question], options: SpanOptions | None = None) -> list[Answer]:
        """Answer questions whose windows all fit into memory. Windows of similar length share a batch."""
        windows = in_memory(block, self._window_tokenizer)
        self.counts += windows.counts
        longest_first = np.argsort(-windows.lengths, kind="stable")
        batches = batch_outputs(
            partial(span_outputs, self.model),
            Collator(windows, self.device, None if find_family(self.model.config).packed else 0),
            longest_first,
            self.batch_size,
            self.device,
            self.precision,
        )
        logits = window_logits(windows, ((ids, values) for ids, _, values in batches))
        return answers_of(block, logits, options or self.span_options)


def blocks(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Split questions into blocks of at most BLOCK_QUESTIONS questions and BLOCK_CHARACTERS characters of contexts.

    A single question with a longer context is a block of its own.
    """
    block: list[Question] = []
    characters = 0
    for question in questions:
        characters += len(question.context)
        if block and (len(block) == BLOCK_QUESTIONS or characters > BLOCK_CHARACTERS):
            yield block
            block, characters = [], len(question.context)
        block.append(question)
    if block:
        yield block


def describe_threshold(model: str, options: SpanOptions) -> str:
    """Describe the threshold for "no answer", and where it is from. Returns "" if it is 0 or not used."""
    threshold = options.null_score_diff_threshold
    if not options.version_2_with_negative or not threshold:
        return ""
    of_model = trained_settings(model).get("null_score_diff_threshold") == threshold
    source = f"from the train_config.yaml of {model}" if of_model else "as given"
    return f"--null_score_diff_threshold {threshold!r} ({source})"


def _settings(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fill settings that are None with those of the training, and check them. Settings without any value are left out.

    Raises UserError for a wrong value, or if the model was trained with a custom task.
    """
    trained = trained_settings(model)
    task = trained.get("task", QUESTION_ANSWERING)
    if task != QUESTION_ANSWERING:
        raise UserError(
            f"{model} was trained with --task {task}: it answers no questions. To predict with it, run"
            f" `hvd-bert predict {model} --input FILE --output FILE`."
        )
    chosen = {name: trained.get(name) if value is None else value for name, value in given.items()}
    settings = {name: value for name, value in chosen.items() if value is not None}
    for name, value in settings.items():
        FLAGS[name].check(name, value)
    return settings


def _questions(question: Any, context: Any) -> list[Question]:
    """Pair questions with contexts. Raises UserError if their numbers differ or a text is unusable."""
    asked = [question] if isinstance(question, str | Mapping) else list(question)
    both = [item for item in asked if isinstance(item, Mapping) and {"question", "context"} <= item.keys()]
    if context is None or both:
        require(
            context is None and len(both) == len(asked),
            'Each question needs one context: give context=..., or dicts as {"question": ..., "context": ...}.',
        )
        question, context = [item["question"] for item in both], [item["context"] for item in both]
    check_types({"question": question, "context": context}, dict.fromkeys(("question", "context"), Texts))
    lengths = {len(texts) for texts in (question, context) if not isinstance(texts, str)} or {1}
    require(
        len(lengths) == 1,
        f"{len(question)} questions, but {len(context)} contexts: give one context for each question, or one for all.",
    )
    (count,) = lengths
    texts, contexts = ([given] * count if isinstance(given, str) else list(given) for given in (question, context))
    questions = [Question(str(n), "", contexts[n], texts[n], (), ()) for n in range(count)]
    for number, made in enumerate(questions):
        if mistake := text_mistake(made):
            which = f"question {number}" if count > 1 else "the question"
            raise UserError(f"{which} cannot be answered: {mistake}. Change it.")
    return questions
