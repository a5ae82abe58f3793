"""Compares predict's throughput with the evaluation's, and this with its forward passes'; measures memory.

    python benchmarks/answering.py speed --model_name_or_path MINILM --file dev-v1.1.json
    python benchmarks/answering.py memory --model_name_or_path MINILM --file dev-v1.1.json

`speed` evaluates and answers the same questions in turns, a hundred at a time, in one process, and in the other order
in every second turn. The evaluation's windows are tokenized before, as by its cache; predict tokenizes them. The
forward passes are those of the evaluation, on batches made before. Prints windows per second of CPU time: median and
range, and the ratios of the turns. `memory` asks about a document of 1 MB,
which is made of the file's contexts, in a new process, and prints the peak of its resident memory.

The model gets a new span head, since only time and memory count.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from compare_report import machine
from shared import markdown_table, spread
from torch import nn
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from hvd_bert.config.command_line import parse
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.questions import Reading
from hvd_bert.data.squad import Question, from_questions, open_file
from hvd_bert.data.tokenization import WindowTokenizer
from hvd_bert.data.windows import in_memory
from hvd_bert.distributed.world import World
from hvd_bert.evaluation.evaluator import Evaluator
from hvd_bert.evaluation.mode import evaluating
from hvd_bert.model.bert import model_inputs
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.model.flops import forward_flops
from hvd_bert.predict.answerer import QuestionAnswerer
from hvd_bert.predict.file_answers import rows_of
from hvd_bert.tasks.inputs import QuestionSet

PART = 100  # questions at a time
DOCUMENT = 10**6  # characters


def forward_passes(model: nn.Module, batches: list[Batch]) -> None:
    """All of an evaluation that needs the model."""
    with evaluating(model):
        for batch in batches:
            model(**model_inputs(batch))


def batches_of(evaluator: Evaluator) -> list[Batch]:
    """An evaluation's batches, in its order."""
    collate, size = Collator(evaluator.windows, torch.device("cpu"), evaluator.pad_to), evaluator.batch_size
    ids = evaluator.window_ids
    return [collate(ids[first : first + size]) for first in range(0, len(ids), size)]


def speed(folder: str, questions: list[Question]) -> None:
    """Print the throughputs and their ratio."""
    keep_memory()  # as both commands do
    torch.set_num_threads(1)
    qa, world = QuestionAnswerer(folder), World()
    config = parse(["--no_do_train", "--model_name_or_path", folder])
    tokenizer = WindowTokenizer(qa.tokenizer, qa.window_options)
    rates: dict[str, list[float]] = {"evaluation": [], "predict": [], "forward passes": []}
    for number, first in enumerate(range(0, len(questions), PART)):
        part = questions[first : first + PART]
        windows = in_memory(part, tokenizer)
        dev = QuestionSet(from_questions("the questions", part), part, windows)
        evaluator = Evaluator(dev.questions, dev.windows, forward_flops(qa.model).crossover, config, world)
        work: dict[str, Callable[[], object]] = {
            "evaluation": partial(evaluator, qa.model),
            "predict": partial(rows_of, part, qa),
            "forward passes": partial(forward_passes, qa.model, batches_of(evaluator)),
        }
        for name in sorted(work, reverse=number % 2 == 1):
            start = time.process_time()
            work[name]()
            rates[name].append(len(windows) / (time.process_time() - start))
    rows = [[name, spread(values)] for name, values in rates.items()]
    print(markdown_table(["command", "windows per second of CPU time"], rows))
    for one, other in (("predict", "evaluation"), ("evaluation", "forward passes")):
        ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        print(f"\n{one} over {other}: {spread(ratios, 3)} in {len(ratios)} turns")


def memory(folder: str, questions: list[Question]) -> None:
    """Print the peak of a process that answers a question about a long document."""
    contexts = itertools.cycle(dict.fromkeys(question.context for question in questions))
    document = ""
    while len(document) < DOCUMENT:
        document += next(contexts) + "\n"
    command = [sys.executable, __file__, "ask", "--model_name_or_path", folder, "--file", "-"]
    done = subprocess.run(command, input=document[:DOCUMENT], capture_output=True, text=True, check=True)
    print(done.stdout.strip())


def ask(folder: str) -> None:
    """In the new process: answer, and print the memory."""
    document = sys.stdin.read()
    qa = QuestionAnswerer(folder)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    qa("Which team won?", document)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(document):,} characters: peak {peak:.0f} MiB, {loaded:.0f} MiB of them for imports and the model")


def main() -> None:
    """Make the model, measure, print."""
    parser = argparse.ArgumentParser(description="Throughput of predict next to the evaluation's, and its memory.")
    parser.add_argument("what", choices=["speed", "memory", "ask"])
    parser.add_argument("--model_name_or_path", required=True, help="Folder of an encoder.")
    parser.add_argument("--file", required=True, help="Questions in a data file.")
    parser.add_argument("--num_questions", type=int, default=1000, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.what == "ask":
        ask(args.model_name_or_path)
        return
    print(machine())
    questions = open_file(args.file, False, Reading(purpose="prediction")).questions()[: args.num_questions]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        for kind in (AutoModelForQuestionAnswering, AutoTokenizer):
            kind.from_pretrained(args.model_name_or_path, trust_remote_code=False).save_pretrained(folder)
        (speed if args.what == "speed" else memory)(folder, questions)


if __name__ == "__main__":
    main()
