"""Question answering on data like SQuAD's: the model marks the answer in the passage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn

from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import Ids, Lengths
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.sources.questions import BadExample
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.evaluation.evaluator import Evaluation, Evaluator
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import sample_answers
from hvd_bert.model.bert import compile_layers, window_losses
from hvd_bert.model.flops import forward_flops, late_weights
from hvd_bert.tasks.base import EvaluationResult, Task
from hvd_bert.tasks.inputs import Inputs, load_inputs


class QuestionAnswering(Task):
    """`inputs`: in place of those that the settings name."""

    metrics: Mapping[str, Literal["max", "min"]] = {"f1": "max", "exact_match": "max", "eval_loss": "min"}

    def __init__(self, config: Config, world: World, inputs: Inputs | None = None) -> None:
        if not config.train.do_train and config.model.model_name_or_path is None:
            raise UserError("--no_do_train: name a trained model with --model_name_or_path, not only --config_name.")
        self.inputs = inputs or load_inputs(config, world)
        self.model, self.tokenizer = self.inputs.model, self.inputs.tokenizer
        self._forward = forward_flops(self.inputs.model)
        self.late_weights = late_weights(self.inputs.model)
        self.evaluates = self.inputs.dev is not None
        if self.inputs.train:
            self.plan = self.inputs.train.plan
            self._collate = Collator(self.inputs.train.windows, world.device, config.data.pad_to)
        self._config, self._world = config, world
        self._evaluator: Evaluator | None = None

    def batch(self, ids: Ids) -> Batch:
        return self._collate(ids)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return window_losses(model, batch)

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        return self.described(self.answer(model))

    def answer(self, model: nn.Module) -> Evaluation:
        """Answer and score the validation questions. A collective."""
        dev = self.inputs.dev
        assert dev is not None
        if self._evaluator is None:
            self._evaluator = Evaluator(dev.questions, dev.windows, self._forward.crossover, self._config, self._world)
        return self._evaluator(model)

    def described(self, evaluation: Evaluation) -> EvaluationResult:
        """What `answer` returned, with its summary and files."""
        assert self.inputs.dev is not None
        data, answers = self._config.data, evaluation.answers
        samples = sample_answers(
            self.inputs.dev.questions, answers, data.version_2_with_negative, data.answer_normalization
        )
        contents = files(answers) | {"eval_samples.json": samples}
        return EvaluationResult(evaluation.metrics, summary(evaluation.metrics), contents)

    def window_names(self, ids: Ids) -> list[str]:
        assert self.inputs.train is not None
        try:
            return [self._question_ids[n] for n in self.inputs.train.windows.numbers("question", ids).tolist()]
        except Exception:  # the data is gone or has changed, or never had questions (bench): no reason to fail
            return super().window_names(ids)

    @cached_property
    def _question_ids(self) -> list[str]:
        """Ids of the training questions, read once more when a message needs them."""
        assert self.inputs.train is not None
        return [question.id for question in self.inputs.train.source.questions()]

    def fingerprint(self) -> dict[str, object]:
        return self.inputs.fingerprint()

    def identity(self) -> dict[str, object]:
        assert self.inputs.train is not None
        return {
            "the tokenizer": self.inputs.tokenizer_digest,
            "the training data": self.inputs.train.source.digest[:12],
        }

    def flops(self, lengths: Lengths, passes: int) -> float:
        return self._forward.training(lengths, passes)

    def bad_examples(self) -> dict[str, list[BadExample]]:
        return self.inputs.bad_examples() if self._config.data.bad_examples == "skip" else {}

    def compile(self, model: nn.Module) -> None:
        compile_layers(model)


def summary(metrics: dict[str, float]) -> str:
    """An evaluation in one line."""
    scores = f"EM {metrics['exact_match']:.2f}  F1 {metrics['f1']:.2f}  loss {metrics['eval_loss']:.3f}"
    return f"{scores}  on {metrics['total']:.0f} questions"


def files(answers: list[Answer]) -> dict[str, Any]:
    """run_qa's files: predictions, n best answers per question and, for v2.0, the odds of "no answer"."""
    contents: dict[str, Any] = {
        "eval_predictions.json": {answer.id: answer.text for answer in answers},
        "eval_nbest_predictions.json": {answer.id: answer.nbest for answer in answers},
    }
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    return contents | ({"eval_null_odds.json": odds} if odds else {})
