"""Flags, paths, names, links and messages that the README and docs/ mention exist.

`mkdocs build --strict` checks links and anchors between the pages of docs/ (mkdocs.yml, `validation`).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import documented
import flags_page
import pytest
import yaml
from documented import PAGES, REPOSITORY, code_spans, headings, section, text_of
from markdown.extensions.toc import slugify

import hvd_bert
from hvd_bert import errors
from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.data.sources import squad
from hvd_bert.distributed import runner, signals

TROUBLESHOOTING = "docs/guides/troubleshooting.md"
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Other programs' flags that the pages mention.
FOREIGN_FLAGS = """
horovodrun: --autotune --no-stall-check --stall-check-shutdown-time-seconds --timeline-filename --binding-args
    --blacklist-cooldown-range --disable-cache --mpi-args
run_qa and TrainingArguments: --auto_find_batch_size --data_seed --dataloader_ --ddp_ --do_predict
    --evaluation_strategy --fsdp --full_determinism --greater_is_better --group_by_length --max_predict_samples
    --overwrite_cache --preprocessing_num_workers --push_to_hub --test_file --token --trust_remote_code
run_glue: --do_regression --label_column_name --task_name --text_column_names
Slurm: --format --gpus-per-task --mem --no-requeue
launchers: --oversubscribe --cpu --mpirun_hostfile --multi_gpu --num_processes --local_rank --module --num_gpus --ppn
    --local-addr --master-port --max-restarts --rdzv-conf --shutdown-timeout --signals-to-handle
containers: --container-image --container-mounts --nv --cap-add --gpus --ipc --shm-size
others: --include --name --private --to --sort --logdir --foreground --preserve-status
"""
GROUPS_OF_FLAGS = {"--save_*"}  # wildcards that a page uses


@cache
def own_flags() -> set[str]:
    """Return the flags of all commands, and every flag in the text of the scripts, benchmarks and examples."""
    parsers = [command_line.make_parser(), *(command.make_parser() for command in flags_page.OTHERS.values())]
    found = {option for parser in parsers for option in parser._option_string_actions}
    for pattern in ("env/*.sh", "env/*.py", "scripts/*", "benchmarks/**/*.py", "examples/*.py", "tests/cluster/*"):
        for path in filter(Path.is_file, REPOSITORY.glob(pattern)):
            found |= set(FLAG.findall(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    known = own_flags().union(FLAG.findall(FOREIGN_FLAGS), {name.rstrip("*") for name in GROUPS_OF_FLAGS})
    assert set(FLAG.findall(text_of(page))) - known == set()


def test_defaults_that_differ_from_run_qas() -> None:
    """The guide's table lists each flag whose default differs from TrainingArguments."""
    from transformers import TrainingArguments

    run_qas = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    differing = {
        f"--{name}"
        for name, flag in FLAGS.items()
        if name in run_qas and _default(run_qas[name]) != flag.default and (_default(run_qas[name]) or flag.default)
    }
    rows = re.findall(r"^\| .*", section("docs/guides/migrating.md", "Defaults that differ"), re.MULTILINE)
    assert differing - set(FLAG.findall(" ".join(rows))) == set()


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory() if callable(field.default_factory) else field.default
    return getattr(made, "value", made)  # an enum's value


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    path = re.compile(r"(?:benchmarks|docs|env|examples|hvd_bert|scripts|tests)/[\w./-]*")
    generated = re.compile(r"env/site\.sh|.*\bNAME\b.*")  # or NAME is a placeholder
    named = {span for span in code_spans(text_of(page)) if path.fullmatch(span) and not generated.fullmatch(span)}
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


def test_pages_name_the_torch_that_is_tested() -> None:
    tested = re.findall(r"^torch==(\S+)", text_of("requirements.txt"), re.MULTILINE)
    named = {version for page in PAGES for version in re.findall(r"--torch (\d[\w.+]*)", text_of(page))}
    assert named <= set(tested)
    assert f"default_torch={tested[0]}\n" in text_of("env/setup.sh")


def test_version_and_date_agree() -> None:
    citation, (version, date) = (
        yaml.safe_load(text_of("CITATION.cff")),
        headings(text_of("CHANGELOG.md"))[1].split(" - "),
    )
    assert citation["version"] == version == hvd_bert.__version__ and str(citation["date-released"]) == date


def test_issue_forms_name_existing_files_and_flags() -> None:
    for form in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        text = form.read_text(encoding="utf-8")
        assert {"name", "description", "body"} <= yaml.safe_load(text).keys(), form
        assert set(FLAG.findall(text)) <= own_flags()
        assert [
            name for name in re.findall(r"\b(?:scripts|docs)/[\w./-]+\w", text) if not (REPOSITORY / name).exists()
        ] == []


def test_file_tree_has_every_folder() -> None:
    tree = text_of("docs/architecture.md").split("## File tree")[1].split("```")[1]
    listed = set(re.findall(r"^ *([\w.]+/?)", tree, re.MULTILINE))
    package = REPOSITORY / "hvd_bert"
    folders = {f"{path.parent.name}/" for depth in ("*", "tools/*") for path in package.glob(f"{depth}/__init__.py")}
    assert folders - listed == set()


def test_import_layers_agree_with_pyproject() -> None:
    layers = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").split("layers = [")[1].split("]")[0]
    checked = [sorted(names.split(" | ")) for names in re.findall(r'"([^"]+)"', layers)]
    table = section("docs/architecture.md", "Import layers")
    rows = re.findall(r"^\| \d+ \| (.*) \|$", table, re.MULTILINE)
    assert [sorted(code_spans(row)) for row in rows] == checked


def test_python_api_has_these_names_and_parameters() -> None:
    rows = [line for line in text_of("docs/reference/python-api.md").splitlines() if "`hvd_bert." in line]
    assert len(rows) > 15
    for row in rows:
        (path,) = {span for span in code_spans(row) if re.fullmatch(r"hvd_bert(\.\w+)+", span)}
        module = importlib.import_module(path.removesuffix(".__version__"))
        spans = code_spans(" ".join(row.strip("| ").split(" | ")[:2]))
        for span in spans:
            if not re.fullmatch(r"[A-Z]\w+|\w+\(.*\)(\.\w+\(\))?", span) or span == "None":
                continue
            name, _, rest = span.partition("(")
            parameters = [word.strip() for word in rest.split(")")[0].split(",") if word.strip(" .")]
            defined = getattr(module, name)
            given = list(inspect.signature(defined).parameters) if parameters else []
            assert parameters == given[: len(parameters)], f"{path}: {span}"


def test_exit_statuses_are_listed() -> None:
    assert flags_page.EXIT_PAGE.read_text(encoding="utf-8") == flags_page.exit_page(), "run scripts/flags_page.py"
    assert errors.STATUSES.keys() == {status for name, status in vars(errors).items() if name.startswith("EXIT_")}
    assert {status for _, status, _ in runner.ENDS} | {128 + n for n in signals.ENDING} <= errors.STATUSES.keys()


def test_environment_variables_are_listed() -> None:
    page = text_of("docs/reference/environment-variables.md")
    variable = re.compile(r"\bHVD_BERT_[A-Z_]+\b")
    files = [path for folder in ("hvd_bert", "scripts", "env") for path in (REPOSITORY / folder).rglob("*")]
    read = {
        name
        for path in files
        if path.suffix in (".py", ".sh", ".slurm")
        for name in variable.findall(path.read_text(encoding="utf-8"))
    }
    assert read - set(variable.findall(page)) == set()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_of_docs(page: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text_of(page))
    for target, anchor in links:
        assert (REPOSITORY / (target or page)).exists(), target
        if anchor:
            assert anchor in {slugify(heading, "-") for heading in headings(text_of(target or page))}, (target, anchor)


def test_the_overview_or_the_list_of_results_links_to_every_page() -> None:
    overview, results = text_of("docs/index.md"), text_of("docs/evidence/results.md")
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    linked = [f"({page})" in overview or f"]({page.removeprefix('evidence/')}" in results for page in pages]
    assert [page for page, found in zip(pages, linked, strict=True) if not found] == ["index.md"]


def messages() -> list[str]:
    """Return all strings in the code and all lines of the scripts, with NUL in place of interpolated values."""
    found = []
    for path in sorted((REPOSITORY / "hvd_bert").rglob("*.py")):
        found += [_text(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    value = re.compile(r"\$\{[^}]*\}|\$\([^()]*\)|\$\w+")
    for folder in ("scripts", "env"):
        for path in filter(Path.is_file, (REPOSITORY / folder).iterdir()):
            found += [value.sub("\0", line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [text for text in found if text]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return re.sub(r"%[.\d]*[a-z]", "\0", node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or "\0") + (_text(node.right) or "\0")
    return ""


def test_quoted_messages_exist() -> None:
    """A troubleshooting heading in backticks quotes a message; a word in capitals or `...` stands for any text."""
    known = messages()
    quoted = [title[1:-1] for title in headings(text_of(TROUBLESHOOTING)) if re.fullmatch(r"`[^`]+`", title)]
    assert len(quoted) > 10
    unknown = []
    for quote in quoted:
        literal = re.split(rf"{documented.PLACEHOLDER}|\.\.\.", quote)
        assert len("".join(literal)) > 12, f"too little is literal in: {quote}"
        longest, pattern = max(literal, key=len), re.compile(".+?".join(map(re.escape, literal)), re.DOTALL)
        unknown += [quote] if not any(longest in text and pattern.search(text) for text in known) else []
    assert unknown == [], "no message of the code or the scripts reads so"


def test_the_pages_of_flags_and_support_are_current():
    for path, page in ((flags_page.PAGE, flags_page.page), (flags_page.SUPPORT_PAGE, flags_page.support_page)):
        assert path.read_text(encoding="utf-8") == page(), "run `python scripts/flags_page.py`"


def test_the_support_matrix_has_all_flags_that_a_strategy_refuses():
    refused = {f"--{text.replace('=', ' ')}" for row in STRATEGIES.values() for text in row.refuses}
    refused |= {f"--{name}" for name, flag in FLAGS.items() if flag.owner}
    listed = {part for flags in flags_page.FEATURES for part in (flags, flags.split(" ")[0])}
    assert refused - listed == set()


def test_the_readmes_questions_are_read(tmp_path):
    (lines,) = re.findall(r"^```json\n(.*?)^```", text_of("README.md"), re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.json").write_text(lines)
    assert len(squad.open_file(tmp_path / "mine.json", False).questions()) == 3
