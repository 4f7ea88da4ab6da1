"""`fwzoo export`, `fwzoo push` and `fwzoo card`: a model as a folder, on the Hub, and described."""

import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import create_repo, upload_folder
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from rich.console import Console

from fwzoo.conversion.card import is_automatic, measured_in, render_card

from .common import bad, empty_folder, first_sentence, load_model, quiet_transformers

# The base of every error of a connection: that of the HTTP client, whichever this version of huggingface_hub uses.
_ConnectionError: Any = HfHubHTTPError.__mro__[1]


def export(model: str, out: Path, **metadata: str | None) -> None:
    """Write weights, tokenizer, code and card to a new folder."""
    quiet_transformers()
    empty_folder("OUT", out, "give another folder.")
    _write(model, out, str(out), metadata)
    files = sum(1 for _ in out.glob("*.py"))
    Console().print(f"wrote {out}: weights, tokenizer, README.md and {files} code files", soft_wrap=True)


def push(model: str, repository: str, private: bool, **metadata: str | None) -> None:
    """Upload what `export` writes to a repository of the Hub, which is created when it does not exist."""
    quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        _write(model, Path(folder), repository, metadata)
        try:
            repository = create_repo(repository, private=private, exist_ok=True).repo_id
            commit = upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload with fwzoo push")
        except HFValidationError as error:
            raise bad("REPOSITORY", f"{repository!r} is not a Hub name ({first_sentence(error)}).") from error
        except (_ConnectionError, OSError) as error:
            raise bad("REPOSITORY", f"{repository!r} cannot be written: {first_sentence(error)}.") from error
    Console().print(f"pushed {repository}: {commit.commit_url}", soft_wrap=True)


def card(model: str, out: Path | None, name: str | None, **metadata: str | None) -> None:
    """Print the card of a model, or write it to a file."""
    quiet_transformers()
    loaded, _ = load_model("MODEL", model)
    text = render_card(loaded, name or model, measured=measured_in(model), **_given(metadata))
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise bad("--out", f"{str(out)!r} cannot be written ({error.strerror}).") from error


def _write(model: str, folder: Path, name: str, metadata: dict[str, str | None]) -> None:
    """What a repository holds.

    A card that somebody wrote for the model is kept, with its new name, unless metadata is given.
    """
    loaded, tokenizer = load_model("MODEL", model)
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written, given = Path(model) / "README.md", _given(metadata)
    text = written.read_text(encoding="utf-8") if written.is_file() and not given else ""
    if text and not is_automatic(text, loaded.config):
        for old in {model, Path(model).resolve().name}:
            text = text.replace(f'"{old}"', f'"{name}"')
    else:
        text = render_card(loaded, name, measured=measured_in(model), **given)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _given(metadata: dict[str, str | None]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if value is not None}
