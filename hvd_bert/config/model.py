"""Settings of the model."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_bert.config.flag import flag, require

DEFAULT_MODEL = "bert-base-uncased"


@dataclass
class ModelArguments:
    model_name_or_path: str | None = flag(
        "model",
        None,
        "Pretrained encoder, for example a BERT: a folder or a hub name.",
        default_text=f"{DEFAULT_MODEL}; with --config_name none, which trains from scratch",
        metavar="NAME",
        may_change_on_resume=True,
        replaces=("config_name", "tokenizer_name"),
        source="model",
    )
    config_name: str | None = flag(
        "model",
        None,
        "Model configuration: a folder or a hub name.",
        default_text="the model's own",
        metavar="NAME",
        may_change_on_resume=True,
        source="model",
    )
    tokenizer_name: str | None = flag(
        "model",
        None,
        "Tokenizer: a folder or a hub name.",
        default_text="the model's own",
        metavar="NAME",
        may_change_on_resume=True,
        source="model",
    )
    cache_dir: str | None = flag(
        "model",
        None,
        "Cache folder for models and data from the hub.",
        default_text="the caches of Hugging Face's libraries",
        metavar="FOLDER",
        may_change_on_resume=True,
    )
    model_revision: str = flag(
        "model",
        "main",
        "Branch, tag or commit of the model on the hub.",
        metavar="REVISION",
        may_change_on_resume=True,
    )
    dropout: float | None = flag(
        "model", None, "Dropout probability of hidden states and attention.", default_text="the model's own"
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path is None and self.config_name is None:
            self.model_name_or_path = DEFAULT_MODEL
        if self.dropout is not None:
            require(0.0 <= self.dropout < 1.0, f"--dropout {self.dropout}: give a probability, 0 <= dropout < 1.")

    @property
    def configuration(self) -> str:
        """Folder or hub name of the model's configuration."""
        return self.config_name or str(self.model_name_or_path)

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer; default: the model's."""
        return self.tokenizer_name or self.model_name_or_path or str(self.config_name)
