"""`fwzoo memorize`: read a text once or more, and keep the memory as a folder that others can load."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from fwzoo import FastWeightCache
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.training.data import encode

from .common import bad, empty_folder, load_model, quiet_transformers

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
    memory = FastWeightCache(loaded.config)
    for number in range(1, passes + 1):
        begin = time.monotonic()
        loss = read(loaded, memory, tokens)
        seconds = time.monotonic() - begin
        console.print(
            f"pass {number}: {tokens.shape[1]:,} tokens in {seconds:.1f} s, {loss:.3f} nats a token", soft_wrap=True
        )
    source = note or f"{text.name}, read {passes} time{'s' * (passes > 1)}."
    memory.save_pretrained(out, source=source, base_model=None if Path(model).exists() else model)
    console.print(f"wrote {out}: {memory.nbytes:,} bytes after {memory.get_seq_length():,} tokens", soft_wrap=True)
    console.print(f"try next: fwzoo generate {model} --memory {out}", soft_wrap=True, highlight=False)


@torch.no_grad()
def read(model: Any, memory: FastWeightCache, tokens: torch.Tensor) -> float:
    """Read tokens `[1, T]` into the memory, piece by piece; returns the mean loss of every token but the first, in nats."""
    total, before = 0.0, None
    for piece in tokens.split(PIECE, 1):
        logits = model(piece, use_cache=True, **{CACHE_KEY: memory}).logits.float()
        guesses = logits[:, :-1] if before is None else torch.cat([before, logits[:, :-1]], 1)
        targets = piece[:, 1:] if before is None else piece
        total += F.cross_entropy(guesses[0], targets[0], reduction="sum").item()
        before = logits[:, -1:]
    return total / (tokens.shape[1] - 1)
