"""Checks of `hvd-bert predict` on several ranks. test_worlds.py compares the answers with those of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import Ranks, check
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering

from hvd_bert.config.settings import PACKAGE
from hvd_bert.data.sources import squad
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.predict import answerer
from hvd_bert.predict.__main__ import parse_flags
from hvd_bert.predict.answering import answer_file

ANSWERS = "predicted/answers.jsonl"


def _prepare(folder: Path) -> None:
    """Save a model with a span head, and a file of 33 questions, three of which cannot be answered."""
    torch.manual_seed(5)
    model = BertForQuestionAnswering(BertConfig.from_pretrained(folder / "tiny", initializer_range=0.3))
    for part in (model, AutoTokenizer.from_pretrained(folder / "tiny")):
        part.save_pretrained(folder / "asked")
    questions = squad.open_file(PACKAGE / "sample" / "dev-v1.1.json.gz", False).questions()[:33]
    rows = [{"id": q.id, "context": q.context * (1 + i % 3), "question": q.question} for i, q in enumerate(questions)]
    for number in (0, 7, 32):
        rows[number]["context"] = ""
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@check
def file_is_answered_as_by_one_rank(ranks: Ranks) -> None:
    world, folder = ranks.world, ranks.folder
    if world.rank == 0:
        _prepare(folder)
    world.allgather(None)
    words = [folder / "asked", "--input", folder / "asked.jsonl", "--output", folder / ANSWERS]
    words += ["--max_seq_length", 40, "--doc_stride", 8]
    flags = parse_flags([str(word) for word in words], Launcher("test", world.size, world.rank))
    answer_block, calls = answerer.QuestionAnswerer.answer_block, []

    def fail_on_the_last_rank(self: answerer.QuestionAnswerer, block: list[squad.Question]) -> list[Answer]:
        calls.append(block)
        if len(calls) == 2 and world.rank == world.size - 1:
            raise UserError("the logits are not finite")
        return answer_block(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answerer, "BLOCK_QUESTIONS", 4)
        with patch.context() as failing, pytest.raises(CollectiveError, match="the logits are not finite"):
            failing.setattr(answerer.QuestionAnswerer, "answer_block", fail_on_the_last_rank)
            answer_file(flags, world)
        if world.rank == 0:
            assert os.listdir((folder / ANSWERS).parent) == []
        with pytest.raises(CollectiveError, match=r"30 question.* 3 row"):
            answer_file(flags, world)
    if world.rank == 0:
        assert os.listdir((folder / ANSWERS).parent) == ["answers.jsonl"]
