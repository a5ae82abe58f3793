"""Upload a trained model to the Hugging Face hub, or to another server that speaks its protocol (HF_ENDPOINT).

    hvd-bert publish runs/mine --repo_id me/mine --dry_run      show what would be uploaded
    hvd-bert publish runs/mine --repo_id me/mine --private

One process. Exit status: 0 uploaded, 1 the hub failed or is out of reach, 2 bad input or no permission.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__
from safetensors import safe_open

from hvd_bert.config.parser import Parser
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, UserError, as_user_error, reason_of
from hvd_bert.output import card
from hvd_bert.output.public import public_settings
from hvd_bert.storage.places import TOKENIZER_FILES
from hvd_bert.storage.reading import read_json
from hvd_bert.streams import keep_running
from hvd_bert.tools.runs.reading import read_yaml


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        flags = make_parser().parse_args(argv)
        return run(flags)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = Parser(
        prog="hvd-bert publish", description="Upload a trained model to the Hugging Face hub, in one commit."
    )
    parser.add_argument("model", metavar="MODEL_FOLDER", type=Path, help="Output folder of a finished training.")
    parser.add_argument(
        "--repo_id", metavar="USER/NAME", type=str, required=True,
        help="Repository on the hub. It is created if missing. (required)",
    )  # fmt: skip
    parser.add_argument(
        "--private", action="store_true", help="Create it as a private repository. An existing public one is refused."
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="Show what would be uploaded, without contacting the hub."
    )
    return parser


WEIGHTS, SETTINGS, RESULTS = "model.safetensors", "train_config.yaml", "train_results.json"
COMMIT_MESSAGE = "Upload a model trained with hvd_bert"
FILES = (card.NAME, "config.json", WEIGHTS, *TOKENIZER_FILES)
# The hub's statuses for what the user can fix -> what to do.
REMEDIES = {
    401: "Log in with `hf auth login`, or set HF_TOKEN to a valid token",
    402: "The account's plan does not include this",
    403: "Use a token with write permission (https://huggingface.co/settings/tokens), or name a repository of your own",
    404: "Check the name of the user or organization in --repo_id",
}


def run(flags: argparse.Namespace) -> int:
    """Show what is uploaded, and upload it unless --dry_run is given. Returns the exit status. Raises UserError."""
    _check_names(flags)
    contents = files_to_upload(flags.model, flags.repo_id)
    print(f"{flags.model} -> {constants.ENDPOINT}/{flags.repo_id}")
    for name, content in contents.items():
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        print(f"  {name:<24} {size / 1e3:12,.1f} kB{'  without paths' if name == SETTINGS else ''}")
    others = sorted({path.name for path in flags.model.iterdir() if not path.name.startswith(".")} - contents.keys())
    print(f"Not uploaded: {', '.join(others) or 'nothing'}.")
    if card.NAME not in contents:
        print(f"There is no {card.NAME}: the hub's page will be empty.")
    if flags.dry_run:
        print("Nothing was uploaded (--dry_run).")
        return EXIT_OK
    if get_token() is None:
        raise UserError("No Hugging Face token was found: log in with `hf auth login`, or set HF_TOKEN.")
    try:
        print(f"Uploaded: {_upload(flags, contents)}")
    except UserError:
        raise
    except Exception as error:  # of the hub's library and of its HTTP client, whose classes differ between releases
        status, message = _explained(error, flags.repo_id)
        print(f"hvd_bert: {message}", file=sys.stderr)
        return status
    return EXIT_OK


def _check_names(flags: argparse.Namespace) -> None:
    try:
        validate_repo_id(flags.repo_id)
    except HFValidationError as error:
        raise UserError(f"--repo_id {flags.repo_id}: {reason_of(error)}.") from None
    if "/" not in flags.repo_id:
        raise UserError(f"--repo_id {flags.repo_id}: name the user or organization too, as in USER/{flags.repo_id}.")


def files_to_upload(folder: Path, repo_id: str) -> dict[str, Path | bytes]:
    """Names in the repository -> files or contents. Raises UserError unless the folder has a finished model."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Name the output folder of a finished training.")
    for name in (RESULTS, SETTINGS, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is not the output folder of a finished training. Rerun the training's"
                " command with this --output_dir to finish it, or name another folder."
            )
    found: dict[str, Path | bytes] = {name: folder / name for name in FILES if (folder / name).is_file()}
    for name in (RESULTS, SETTINGS, *found):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{folder / name} is a link to {(folder / name).resolve()}, which is not in the folder. Copy the file"
                " to the link's place."
            )
    for name in found:
        _check_content(folder / name)
    with as_user_error(lambda reason: f"The records in {folder} cannot be read ({reason}). Name another folder."):
        if card.is_ours(folder / card.NAME):
            found[card.NAME] = card.with_name(folder / card.NAME, repo_id).encode()
        results, settings = read_json(folder / RESULTS), read_yaml(folder / SETTINGS)
        public = public_settings(settings, results.get("from_hub", {}))
    return found | {SETTINGS: yaml.safe_dump(public, sort_keys=False).encode()}


def _check_content(path: Path) -> None:
    """Raise UserError for a file that is cut off."""
    with as_user_error(lambda reason: f"{path} is damaged ({reason}). Train again."):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np"):  # compares the file's size with its header
                pass
        elif path.suffix == ".json":
            read_json(path)


def _upload(flags: argparse.Namespace, contents: dict[str, Path | bytes]) -> str:
    """Upload in one commit. Returns its address."""
    api = HfApi()
    print(f"Logged in as {api.whoami()['name']}.")
    api.create_repo(flags.repo_id, private=flags.private or None, exist_ok=True)
    if flags.private and not api.repo_info(flags.repo_id).private:
        raise UserError(
            f"--private: the repository {flags.repo_id} exists and is public. Make it private in its settings on the"
            " hub, or name another one."
        )
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    return api.create_commit(flags.repo_id, operations, commit_message=COMMIT_MESSAGE).commit_url


def _explained(error: Exception, repo_id: str) -> tuple[int, str]:
    """The exit status and the message for an error of an upload."""
    if isinstance(error, OfflineModeIsEnabled):
        return EXIT_BAD_INPUT, "HF_HUB_OFFLINE is set, so nothing is uploaded. Unset it."
    if isinstance(error, ValueError) and card.NAME in str(error):  # raised by create_commit's check of the metadata
        return EXIT_BAD_INPUT, f"{reason_of(error)}. Nothing was uploaded. Fix the header of {card.NAME}."
    if isinstance(error, OSError) and error.filename:
        return EXIT_FAILURE, f"{error.filename} cannot be read ({error.strerror}). Nothing was uploaded."
    if not isinstance(error, HfHubHTTPError):
        what_to_do = "Check the network; on a cluster, publish from a node with access to the internet"
        return EXIT_FAILURE, f"The upload to {constants.ENDPOINT} failed ({reason_of(error)}). {what_to_do}."
    status = error.response.status_code
    said = f"{constants.ENDPOINT} refuses the upload to {repo_id} with status {status}"
    said += f" ({error.server_message})" if error.server_message else ""
    if status in REMEDIES:
        return EXIT_BAD_INPUT, f"{said}. {REMEDIES[status]}."
    if status == 409:
        return EXIT_FAILURE, f"{said}: the repository was changed at the same time. Rerun the command."
    return EXIT_FAILURE, f"{said}. Rerun the command later."


if __name__ == "__main__":
    keep_running()
    sys.exit(main())
