"""`fwzoo eval` and `fwzoo ablate`: their options; what they do is in `fwzoo.evaluation`.

Every one of them writes its results into a folder piece by piece; the same command goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import number, numbers

eval_app = typer.Typer(name="eval", help="Measure what a memory can do: addition, recall, needles, long texts.")
ablate_app = typer.Typer(name="ablate", help="Switch the parts of an architecture off, one at a time.")

Out = Annotated[Path, typer.Option(help="Folder for the results; the same command goes on with what is in it.")]
Layouts = Annotated[
    str | None, typer.Option(help="Layouts, with ';' between (see the documentation of hybrid layouts).")
]
Seeds = Annotated[int, number("How many seeds, from 0.", int, 1)]
Steps = Annotated[int, number("Training steps.", int, 1)]
BatchSize = Annotated[int, number("Rows a step.", int, 1)]
LearningRate = Annotated[float, number("Peak learning rate.", float, above=0)]
HiddenSize = Annotated[int, number("Width of the models.", int, 1)]
Layers = Annotated[int, number("Layers of the models.", int, 1)]
Heads = Annotated[int, number("Heads a layer; they divide the width.", int, 1)]
Growth = Annotated[
    float, number("Share of the steps over which the numbers grow to --digits; 0: not at all.", float, 0, 1)
]
Text = Annotated[Path, typer.Option(help="The text to read: a UTF-8 file.")]
Train = Annotated[list[str] | None, typer.Option(help="A text or JSON-lines file to train on; may be given again.")]


@contextmanager
def _experiment() -> Iterator[Any]:
    """A console; what is wrong with the input is one sentence, an interrupt says how to go on."""
    from rich.console import Console

    from .common import bad, quiet_transformers, resumable

    quiet_transformers()
    console = Console()
    try:
        with resumable(console):
            yield console
    except (ValueError, TypeError) as error:
        raise bad("eval", " ".join(str(error).split())) from error


def _layouts(given: str | None, usual: tuple[str, ...]) -> list[str]:
    return list(usual) if given is None else [name.strip() for name in given.split(";") if name.strip()]


def _tokens(option: str, paths: list[str], tokenizer: Any) -> Any:
    """All documents of some files as one int64 array."""
    import numpy as np

    from fwzoo.training.data import Files, SourceError, encode

    from .common import bad

    try:
        pieces = [encode(tokenizer, piece) for document in Files(tuple(paths)).documents() for piece in document]
    except SourceError as error:
        raise bad(option, str(error)) from error
    if not pieces or not sum(map(len, pieces)):
        raise bad(option, f"{', '.join(map(repr, paths))} holds no text; allowed is a file with text.")
    return np.concatenate(pieces)


@eval_app.command()
def addition(
    out: Out,
    layouts: Layouts = None,
    digits: Annotated[int, number("Digits of the longest numbers in training.", int, 1)] = 32,
    test_digits: Annotated[int, number("Digits of the longest numbers in the test.", int, 2)] = 48,
    hidden_size: HiddenSize = 256,
    layers: Layers = 12,
    heads: Heads = 4,
    steps: Steps = 2000,
    batch_size: BatchSize = 128,
    lr: LearningRate = 2.5e-3,
    problems: Annotated[int, number("Test problems of every number of digits.", int, 1)] = 256,
    growth: Growth = 0.75,
    seeds: Seeds = 1,
) -> None:
    """Train on additions of up to --digits digits and test on longer ones, for several architectures alike."""
    from fwzoo.evaluation.addition import ARCHITECTURES, Settings, run, variants

    with _experiment() as console:
        settings = _addition_settings(
            Settings, digits, test_digits, hidden_size, layers, heads, steps, batch_size, lr, problems, growth
        )
        run(out, "addition", variants(_layouts(layouts, ARCHITECTURES)), settings, range(seeds), console)


def _addition_settings(made: Any, digits: int, test_digits: int, *others: Any) -> Any:
    from .common import bad

    if test_digits <= digits:
        raise bad("--test-digits", f"{test_digits} is not allowed; allowed is more than --digits = {digits}.")
    return made(digits, test_digits, *others)


@ablate_app.command()
def falcon(
    out: Out,
    layout: Annotated[str, typer.Option(help="The Falcon rule, or a layout with one.")] = "falcon3a",
    digits: Annotated[int, number("Digits of the longest numbers in training.", int, 1)] = 16,
    test_digits: Annotated[int, number("Digits of the longest numbers in the test.", int, 2)] = 24,
    hidden_size: HiddenSize = 128,
    layers: Layers = 3,
    heads: Heads = 4,
    steps: Steps = 1500,
    batch_size: BatchSize = 128,
    lr: LearningRate = 3e-3,
    problems: Annotated[int, number("Test problems of every number of digits.", int, 1)] = 256,
    growth: Growth = 0.3,
    seeds: Seeds = 3,
) -> None:
    """{read after, before the write} x {shifted, same-step pairs} of a Falcon rule, on the addition task."""
    from fwzoo.evaluation.addition import Settings, ablation, run

    from .common import bad

    with _experiment() as console:
        if "falcon" not in layout.lower():
            raise bad("--layout", f"{layout!r} is not allowed; allowed is a layout with a Falcon rule.")
        settings = _addition_settings(
            Settings, digits, test_digits, hidden_size, layers, heads, steps, batch_size, lr, problems, growth
        )
        run(out, "ablate falcon", ablation(layout), settings, range(seeds), console)


@eval_app.command()
def recall(
    out: Out,
    layouts: Layouts = None,
    state_bytes: Annotated[int, number("Bytes of state of every model.", int, 1)] = 40960,
    pairs: Annotated[int, number("Pairs at most in training.", int, 1)] = 64,
    test_pairs: Annotated[Any, numbers("Numbers of pairs to test.", 1)] = (4, 8, 16, 32, 48, 64, 96, 128),
    symbols: Annotated[int, number("Number of keys, and of values.", int, 2)] = 256,
    hidden_size: HiddenSize = 128,
    layers: Layers = 2,
    heads: Heads = 2,
    steps: Steps = 1500,
    batch_size: BatchSize = 64,
    lr: Annotated[Any, numbers("Peak learning rates to try; the best one counts.", above=0, kind=float)] = (2e-3, 8e-3),
    seeds: Seeds = 1,
) -> None:
    """Multi-query associative recall: how many pairs every mixer recalls with the same bytes of state."""
    from fwzoo.evaluation.recall import MODELS, Settings, run

    from .common import bad

    with _experiment() as console:
        if (most := max(pairs, *test_pairs)) > symbols:
            raise bad("--symbols", f"{symbols} is not allowed; allowed are as many as pairs, {most} or more.")
        settings = Settings(
            state_bytes=state_bytes,
            pairs=pairs,
            test_pairs=test_pairs,
            asked=min(32, pairs),
            symbols=symbols,
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            steps=steps,
            batch_size=batch_size,
            lrs=lr,
        )
        run(out, _layouts(layouts, MODELS), settings, range(seeds), console)


@eval_app.command()
def niah(
    out: Out,
    text: Text,
    model: Annotated[str | None, typer.Argument(help="A model folder or a Hub name; or give --train.")] = None,
    train: Train = None,
    layout: Annotated[str, typer.Option(help="Layout of the model to train.")] = "sliding_attention+fwpkm@0",
    lengths: Annotated[Any, numbers("Lengths of haystacks, in tokens.", 16)] = (4096, 8192, 16384, 32768, 65536),
    depths: Annotated[int, number("Needles a haystack, at so many depths.", int, 1, 62)] = 16,
    passes: Annotated[int, number("How often to read a haystack.", int, 1)] = 4,
    samples: Annotated[int, number("Haystacks of every length.", int, 1)] = 16,
    batch_size: Annotated[int, number("Haystacks read at once.", int, 1)] = 16,
    piece: Annotated[int, number("Tokens read at once.", int, 1)] = 4096,
    train_length: Annotated[int, number("Tokens of a row to train on.", int, 32)] = 4096,
    needles: Annotated[int, number("Needles in a row to train on.", int, 1, 62)] = 48,
    hidden_size: HiddenSize = 128,
    subkeys: Annotated[int, number("Sub-keys a half of a product-key memory.", int, 8)] = 64,
    chunk_size: Annotated[int, number("Tokens between updates of a memory.", int, 1)] = 512,
    steps: Steps = 1000,
    lr: LearningRate = 2e-3,
    seed: Annotated[int, number("Seed of weights and training rows.", int, 0)] = 0,
) -> None:
    """Needles in a haystack: pairs hidden in a text, asked for after one and more readings, by depth and length."""
    import torch
    from transformers import AutoModelForCausalLM

    from fwzoo.evaluation.ablation import Model
    from fwzoo.evaluation.niah import Settings, Training, run
    from fwzoo.training.data import load_tokenizer

    from .common import bad, load_model

    with _experiment() as console:
        settings = Settings(lengths, depths, passes, samples, batch_size, piece)
        if (model is None) == (not train):
            raise bad("MODEL", "give a model, or text to train one on (--train); one of the two.")
        if lengths[0] < 4 * depths:
            raise bad(
                "--lengths", f"{lengths[0]} is not allowed with {depths} depths; allowed is {4 * depths} or more."
            )
        if model is not None:
            loaded, tokenizer = load_model("MODEL", model)
            run(out, model, loaded, tokenizer, _tokens("--text", [str(text)], tokenizer), settings, console)
            return
        training = Training(train_length, needles, min(chunk_size, train_length // 4), steps=steps, lr=lr)
        if training.length < 4 * needles + 2 * training.gap:
            raise bad("--needles", f"{needles} do not fit into rows of --train-length = {train_length} tokens.")
        tokenizer = load_tokenizer("bytes")
        torch.manual_seed(seed)
        fresh = AutoModelForCausalLM.from_config(
            Model(hidden_size, subkeys, chunk_size).config(tokenizer, layout=layout)
        )
        texts = (_tokens("--text", [str(text)], tokenizer), _tokens("--train", train or [], tokenizer))
        run(out, layout, fresh, tokenizer, texts[0], settings, console, training, texts[1], seed)


@eval_app.command()
def ppl(
    model: Annotated[str, typer.Argument(help="A folder that training wrote, or a Hub name.")],
    out: Out,
    text: Text,
    window: Annotated[int, number("Tokens after which the memory is reset.", int, 4)] = 2048,
    tokens: Annotated[int, number("Tokens of the text at most.", int, 8)] = 1 << 20,
    batch_size: Annotated[int, number("Windows read at once, where the memory is reset.", int, 1)] = 8,
) -> None:
    """Perplexity against position in a long text: memory carried, reset every window, and sliding windows."""
    import torch

    from fwzoo.evaluation.perplexity import Settings, run

    from .common import load_model

    with _experiment() as console:
        loaded, tokenizer = load_model("MODEL", model)
        ids = torch.from_numpy(_tokens("--text", [str(text)], tokenizer))
        run(out, model, loaded, ids, Settings(window, tokens, batch_size), console)


@ablate_app.command()
def fwpkm(
    out: Out,
    text: Text,
    train: Train = None,
    length: Annotated[int, number("Tokens of the haystacks.", int, 64)] = 800,
    passes: Annotated[int, number("How often to read a haystack.", int, 1)] = 4,
    train_length: Annotated[int, number("Tokens of a row to train on.", int, 32)] = 200,
    needles: Annotated[int, number("Needles in a row to train on.", int, 1, 62)] = 32,
    hidden_size: HiddenSize = 64,
    subkeys: Annotated[int, number("Sub-keys a half.", int, 16)] = 32,
    chunk_size: Annotated[int, number("Tokens between updates.", int, 1)] = 16,
    steps: Steps = 300,
    batch_size: BatchSize = 32,
    lr: LearningRate = 3e-3,
    seeds: Seeds = 1,
) -> None:
    """FwPKM with one technique switched off at a time: recall, needles by reading, use of slots, gates."""
    from fwzoo.evaluation.ablation import Model, run
    from fwzoo.evaluation.niah import Settings, Training, symbols
    from fwzoo.training.data import load_tokenizer

    from .common import bad

    with _experiment() as console:
        gap = min(chunk_size, train_length // 4)
        training = Training(train_length, needles, gap, text_share=0.05, steps=steps, batch_size=batch_size, lr=lr)
        if training.length < 4 * needles + 2 * gap:
            raise bad("--needles", f"{needles} do not fit into rows of --train-length = {train_length} tokens.")
        tokenizer = load_tokenizer("bytes")
        own = _tokens("--text", [str(text)], tokenizer)
        other = _tokens("--train", train, tokenizer) if train else own
        settings = Settings((length,), 16, passes, samples=8, batch_size=8, piece=4096)
        model = Model(hidden_size, subkeys, chunk_size)
        run(out, tokenizer, symbols(tokenizer), own, other, model, training, settings, range(seeds), console)
