"""`fwzoo generate`: continue a prompt or hold a conversation, and keep its memory in a file."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.generation.streamers import BaseStreamer

from fwzoo import FastWeightCache
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.training.data import encode
from fwzoo.training.interrupt import DeferredInterrupt

from .common import bad, blamed_on, load_model, quiet_transformers

MEMORY_FORMAT = "fwzoo-memory-1"


class Conversation:
    """A text that grows in turns, and the fast-weight memory of what the model has read of it.

    Args:
        model, tokenizer: a fwzoo causal language model and its tokenizer.
        sampling: keyword arguments for `generate`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **sampling: Any):
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.cache = FastWeightCache(model.config)
        self.ids: list[int] = []
        """Every token so far; the cache has seen all of them or all but the last few."""

    def add(self, text: str) -> None:
        """Append `text`; the model reads it with the next reply."""
        self.ids.extend(encode(self.tokenizer, text).tolist())

    def reply(self, max_new_tokens: int, streamer: BaseStreamer | None = None) -> str:
        """Generate, append and return a continuation of at most `max_new_tokens` tokens; Ctrl-C ends it early."""
        prompt = torch.tensor([self.ids], device=self.model.device)
        with DeferredInterrupt() as interrupt:
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], interrupt.requested).to(ids.device)],
                **{CACHE_KEY: self.cache},
                **self.sampling,
            )
        begin, self.ids = len(self.ids), output[0].tolist()
        if self.ids[-1] == self.tokenizer.eos_token_id:
            self.ids.pop()  # the memory has not read it, and the text may go on
        return self.tokenizer.decode(self.ids[begin:], skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the memory: the tensors of `cache.state_dict()`, with the tokens of the text as metadata."""
        metadata = {
            "format": MEMORY_FORMAT,
            "model_type": self.model.config.model_type,
            "tokens": json.dumps(self.ids),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.cache.state_dict().items()}
        save_file(tensors, path, metadata)

    def load(self, path: Path) -> None:
        """Take over the memory and the text that `save` wrote, possibly in another process.

        Raises:
            ValueError: the file is none of `save`'s, or another model's.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{str(path)!r} is not a readable safetensors file ({error}).") from error
        if metadata.get("format") != MEMORY_FORMAT:
            raise ValueError(f"{str(path)!r} holds no memory; allowed is a file that --save-memory wrote.")
        if metadata["model_type"] != self.model.config.model_type:
            raise ValueError(
                f"{str(path)!r} is the memory of a {metadata['model_type']} model; "
                f"this model is {self.model.config.model_type}."
            )
        tensors = load_file(path, device=str(self.model.device))
        try:
            self.cache.load_state_dict(tensors)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} does not fit this model: {error}") from error
        self.ids = json.loads(metadata["tokens"])


def run(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    greedy: bool,
    seed: int | None,
    save_memory: Path | None,
    load_memory: Path | None,
    memory: str | None,
) -> None:
    """Generate once for a prompt, a file or piped text, or in turns at a terminal."""
    quiet_transformers()
    sampling = _sampling(greedy, temperature, top_p)
    if save_memory is not None and not save_memory.resolve().parent.is_dir():
        raise bad("--save-memory", f"the folder of {str(save_memory)!r} does not exist; allowed is an existing folder.")
    if memory is not None and load_memory is not None:
        raise bad("--memory", f"{memory!r} and --load-memory exclude each other; give one.")
    text = _prompt(prompt, prompt_file, has_memory=load_memory is not None)
    loaded, tokenizer = load_model("MODEL", model)
    conversation = Conversation(loaded, tokenizer, **sampling)
    if load_memory is not None:
        try:
            conversation.load(load_memory)
        except ValueError as error:
            raise bad("--load-memory", str(error)) from error
    if memory is not None:
        with blamed_on("--memory"):
            conversation.cache = FastWeightCache.from_pretrained(memory, loaded)
    if seed is not None:
        set_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if text is None:
        _converse(conversation, max_new_tokens, streamer)
    else:
        conversation.add(text)
        if not conversation.ids:
            raise bad("--prompt", f"{text!r} is empty; allowed is a text of at least one token.")
        conversation.reply(max_new_tokens, streamer)
    if save_memory is not None and conversation.ids:
        conversation.save(save_memory)
        Console(stderr=True).print(
            f"saved {save_memory}: {conversation.cache.nbytes:,} bytes after {len(conversation.ids):,} tokens",
            soft_wrap=True,
        )


def _sampling(greedy: bool, temperature: float | None, top_p: float | None) -> dict[str, Any]:
    if greedy:
        for option, value in (("--temperature", temperature), ("--top-p", top_p)):
            if value is not None:
                raise bad(option, f"{value} and --greedy exclude each other; give one.")
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": 0.8 if temperature is None else temperature,
        "top_p": 0.95 if top_p is None else top_p,
        "top_k": 0,
    }


def _prompt(prompt: str | None, prompt_file: Path | None, has_memory: bool) -> str | None:
    """The text to continue; None means to ask for it at the terminal."""
    if prompt is not None and prompt_file is not None:
        raise bad("--prompt-file", f"{str(prompt_file)!r} and --prompt exclude each other; give one.")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise bad("--prompt-file", f"{str(prompt_file)!r} is not a readable UTF-8 file ({error}).") from error
    if sys.stdin.isatty():
        return None
    return "" if has_memory else sys.stdin.read()


def _converse(conversation: Conversation, max_new_tokens: int, streamer: BaseStreamer) -> None:
    console = Console(stderr=True)
    console.print("Type a line to be continued; an empty line or Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        conversation.add(line if not conversation.ids else "\n" + line)
        conversation.reply(max_new_tokens, streamer)
