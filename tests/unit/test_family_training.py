"""DeBERTa-v2 from the command line's settings to the saved model, and model folders without a family."""

from __future__ import annotations

import json

import torch
from family_tokenizers import MAKERS
from tables import refused
from test_train_run import process_stays_as_it_was, train  # noqa: F401  # an autouse fixture
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertConfig, DebertaV2Config

from hvd_bert import QuestionAnswerer
from hvd_bert.config.settings import ModelArguments
from hvd_bert.model.bert import load_model, load_tokenizer

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 130, "initializer_range": 0.3,
}  # fmt: skip


def test_training_to_a_model_that_transformers_loads(tmp_path, make_questions, write_squad, caplog):
    caplog.set_level("INFO")
    tokenizer, out = MAKERS["deberta-v2"](), tmp_path / "out"
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": "c2p|p2c"}
    config = DebertaV2Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES, **settings)
    config.save_pretrained(tmp_path / "model")
    questions = make_questions(6)
    file = str(write_squad(questions))
    flags = ["--config_name", str(tmp_path / "model"), "--train_file", file, "--validation_file", file]
    flags += ["--max_seq_length", "120", "--doc_stride", "8", "--strategy", "none", "--num_threads", "1"]
    flags += ["--num_train_epochs", "30", "--learning_rate", "5e-3", "--output_dir", str(out)]
    train(flags, "--per_device_train_batch_size", "3", "--eval_strategy", "no", "--save_steps", "0")
    results = json.loads((out / "train_results.json").read_text())
    assert json.loads((out / "eval_results.json").read_text())["f1"] > 80, results
    padded = [record.message for record in caplog.records if "padded to the longest" in record.message]
    assert len(padded) == 1
    shares = [json.loads(line)["padding_share"] for line in (out / "metrics.jsonl").read_text().splitlines()
              if "padding_share" in line]  # fmt: skip
    assert shares and all(share > 0 for share in shares)

    # In plain transformers, padded and with its own tokenizer, it gives the same answers.
    model = AutoModelForQuestionAnswering.from_pretrained(out).eval()
    saved = AutoTokenizer.from_pretrained(out)
    answers = QuestionAnswerer(out).answers(questions)
    for question, answer in zip(questions, answers, strict=True):
        inputs = saved(question.question, question.context, padding="max_length", max_length=125, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs)
        best = answer.nbest[0]
        for side in ("start", "end"):
            found = logits[f"{side}_logits"][0]
            assert (found - best[f"{side}_logit"]).abs().min() < 1e-4


def test_old_folder_without_a_model_type(tokenizer, tmp_path):
    folder, complete = tmp_path / "old", tmp_path / "complete"
    config = BertConfig(vocab_size=len(tokenizer), **SIZES)
    load_model_of = AutoModelForQuestionAnswering.from_config(config)
    load_model_of.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(sorted(tokenizer.vocab, key=tokenizer.vocab.get)))
    config.save_pretrained(complete)
    content = json.loads((folder / "config.json").read_text())
    del content["model_type"]
    (folder / "config.json").write_text(json.dumps(content))
    args = ModelArguments(model_name_or_path=str(folder))
    for load in (lambda: load_tokenizer(args), lambda: load_model(args, tokenizer, 32, seed=1)):
        with refused("config.json", "model_type", "--config_name"):
            load()
    args = ModelArguments(model_name_or_path=str(folder), config_name=str(complete))
    loaded = load_tokenizer(args)
    assert loaded("what is red?")["input_ids"] == tokenizer("what is red?")["input_ids"]
    model = load_model(args, loaded, 32, seed=1)
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight, load_model_of.bert.embeddings.word_embeddings.weight
    )
