"""Distil question answering: a student learns from the answers and from the logits of a trained teacher.

    python examples/distillation.py runs/teacher config=sample output_dir=runs/student
    horovodrun -np 2 -H localhost:2 python examples/distillation.py runs/teacher \
        model_name_or_path=small-bert train_file=train.json validation_file=dev.json output_dir=runs/student

After the teacher (an output folder or a name on the hub) come words NAME=VALUE for the trainer's --NAME VALUE. The
student's folder is that of any question-answering model.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from hvd_bert import train
from hvd_bert.config.data import QUESTION_ANSWERING, ModelArguments
from hvd_bert.config.parser import checked_path
from hvd_bert.config.settings import Config
from hvd_bert.data.window_cutting import WindowOptions, WindowTokenizer
from hvd_bert.errors import UserError
from hvd_bert.model.bert import load_model
from hvd_bert.model.layers import place
from hvd_bert.tasks.base import MicroBatch
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tasks.tokenizer import load_tokenizer

NEVER = -1e4  # logit of positions after a window's end, where a Kullback-Leibler divergence cannot take -inf


class Distillation(QuestionAnswering):
    """Question answering with a loss that also compares the student's logits with the teacher's."""

    trained_as = QUESTION_ANSWERING
    teacher_name: ClassVar[str] = ""  # an output folder or a name on the hub
    temperature: ClassVar[float] = 2.0
    answer_share: ClassVar[float] = 0.5  # share of the loss that compares with the answers
    teacher: Any

    def load(self, config: Config) -> None:
        if not self.teacher_name:
            raise UserError("No teacher is given. Start `python examples/distillation.py TEACHER [NAME=VALUE ...]`.")
        super().load(config)
        data, args = self.config.data, ModelArguments(model_name_or_path=checked_path("teacher", self.teacher_name))
        tokenizer = load_tokenizer(args)
        one, other = (WindowTokenizer(each, WindowOptions()).backend.to_str() for each in (tokenizer, self.tokenizer))
        if one != other:
            raise UserError(
                f"The teacher {self.teacher_name} has another tokenizer than the student, {config.model.tokenizer}."
                f" Name another teacher or, for a new student, give tokenizer_name={self.teacher_name}."
            )
        padded = data.pad_to is not None
        self.teacher = load_model(args, tokenizer, data.max_seq_length, 0, padded, needs_head=True).eval()
        digest = hashlib.sha256()
        for weights in self.teacher.state_dict().values():
            digest.update(weights.numpy())
        self.teacher_digest = digest.hexdigest()[:12]
        place(self.teacher, self.world.device)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        losses, logits = self.forward(model, batch.content)
        with torch.no_grad():
            wanted = self.forward(self.teacher, batch.content)[1]
        student, teacher = map(self.log_probabilities, (logits, wanted))
        differences = kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean(1)
        # Gradients of the softened logits shrink with the square of the temperature.
        return self.answer_share * losses + (1 - self.answer_share) * self.temperature**2 * differences

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log probabilities at the temperature, [windows, 2, tokens]: of starts, and of ends."""
        return log_softmax(logits.unflatten(1, (2, -1)).clamp(min=NEVER) / self.temperature, -1)

    def fingerprint(self) -> dict[str, object]:
        return {"the teacher": self.teacher_digest, **super().fingerprint()}

    def identity(self) -> dict[str, object]:
        loss = f"temperature {self.temperature}, answers {self.answer_share}"
        return {"the teacher": self.teacher_digest, "the distillation": loss, **super().identity()}


def main(teacher: str = "", *words: str) -> None:
    Distillation.teacher_name = teacher
    if wrong := [word for word in words if "=" not in word]:
        raise UserError(f"{', '.join(wrong)}: write each setting as NAME=VALUE, for example seed=1.")
    settings: dict[str, Any] = dict(word.split("=", 1) for word in words)
    train(task=Distillation, **settings)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.status)
