"""`fwzoo inspect`: what the memories of a model do with a text."""

from pathlib import Path

import torch
from rich.console import Console

from fwzoo.analysis import memory_report
from fwzoo.training.data import encode

from .common import bad, blamed_on, empty_folder, load_model, quiet_transformers


def run(name: str, text: Path, out: Path, tokens: int) -> None:
    """Let a saved model read the first `tokens` tokens of a file; write the report into the folder `out`."""
    quiet_transformers()
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad("--text", f"{str(text)!r} cannot be read as text ({error}); allowed is a UTF-8 text file.") from error
    if not content.strip():
        raise bad("--text", f"{str(text)!r} is empty; allowed is a file with text.")
    empty_folder("--out", out, "allowed is a new or empty folder.")
    model, tokenizer = load_model("MODEL", name)
    ids = torch.from_numpy(encode(tokenizer, content)[:tokens].astype("int64"))
    with blamed_on("MODEL"):
        report = memory_report(model, ids[None].to(model.device))
    written = report.save(out, [tokenizer.decode([token]) for token in ids.tolist()])
    console = Console()
    console.print(str(report), soft_wrap=True)
    console.print("written: " + ", ".join(str(path) for path in written), soft_wrap=True)
