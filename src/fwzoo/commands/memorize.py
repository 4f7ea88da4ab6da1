"""`fwzoo memorize`: read a text once or more, and keep the memory as a folder that others can load."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fwzoo.training.data import encode

from .common import bad, blamed_on, empty_folder, load_model, quiet_transformers

PIECE = 2048  # tokens a call


def run(model: str, text: Path, passes: int, out: Path, note: str | None) -> None:
    """Read the text `passes` times, print what each pass cost, and write the memory."""
    quiet_transformers()
    empty_folder("--out", out, "give another folder.")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad("--text", f"{str(text)!r} is not a readable UTF-8 file ({error}).") from error
    loaded, tokenizer = load_model("MODEL", model)
    tokens = torch.from_numpy(encode(tokenizer, content))[None].to(loaded.device)
    if tokens.shape[1] < 2:
        raise bad("--text", f"{str(text)!r} has {tokens.shape[1]} tokens; allowed is a text of at least two.")
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, blamed_on("MODEL"):
        meter = Meter(loaded, tokens, progress, passes)
        memory = loaded.memorize(tokens, passes, piece_size=PIECE, on_piece=meter)
    source = note or f"{text.name}, read {passes} time{'s' * (passes > 1)}."
    memory.save_pretrained(out, source=source, base_model=None if Path(model).exists() else model)
    console.print(f"wrote {out}: {memory.nbytes:,} bytes after {memory.get_seq_length():,} tokens", soft_wrap=True)
    console.print(f"try next: fwzoo generate {model} --memory {out}", soft_wrap=True, highlight=False)


class Meter:
    """Watches `memorize`: moves a progress bar, and says after every pass how long it took and what its mean loss was.

    Attributes:
        losses: of every pass, the mean loss of every token but the first, in nats.
    """

    def __init__(self, model: Any, tokens: torch.Tensor, progress: Progress, passes: int) -> None:
        """tokens `[1, T]`, the text."""
        self.model, self.tokens, self.progress = model, tokens, progress
        self.task = progress.add_task("", total=passes * tokens.shape[1])
        self.losses: list[float] = []
        self.total, self.begin = 0.0, time.monotonic()

    def __call__(self, number: int, start: int, hidden: torch.Tensor) -> None:
        """hidden `[1, piece, D]`, the final states of the tokens from `start`."""
        targets = self.tokens[0, start + 1 : start + 1 + hidden.shape[1]]
        logits = self.model.lm_head(hidden[0, : targets.shape[0]]).float()
        self.total += F.cross_entropy(logits, targets, reduction="sum").item()
        self.progress.advance(self.task, hidden.shape[1])
        size = self.tokens.shape[1]
        if start + hidden.shape[1] == size:
            self.losses.append(self.total / (size - 1))
            seconds = time.monotonic() - self.begin
            self.progress.console.print(
                f"pass {number}: {size:,} tokens in {seconds:.1f} s, {self.losses[-1]:.3f} nats a token", soft_wrap=True
            )
            self.total, self.begin = 0.0, time.monotonic()
