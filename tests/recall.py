"""The recall toy: key-value pairs, read once, asked for at least a chunk later. Embedding, one FwPKM layer, tied head.

Run: python tests/recall.py [--steps 150]

Prints recall at the training length and with four times as many pairs, after 1, 2 and 4 passes, after binding the same keys
four times, with few slots read, and without row averaging.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fwzoo
from fwzoo.modeling.memories.fwpkm import FwpkmMemory

CHUNK = 16


class Toy(nn.Module):
    """Symbols `[B, T]` to logits of some positions `[B, X, symbols]`: embedding, one FwPKM layer, norm, tied head.

    There is no residual round the layer: with one, 32 pairs are recalled so well after 150 steps that a second pass has
    nothing to add.
    """

    def __init__(self, symbols: int, subkeys: int = 32, top_k: int = 8, **options: Any) -> None:
        super().__init__()
        self.config = fwzoo.FwpkmConfig(
            hidden_size=64,
            num_attention_heads=1,
            num_hidden_layers=1,
            memory_key_dim=64,
            memory_value_dim=64,
            memory_chunk_size=CHUNK,
            training_scope="sequence",
            fwpkm_subkeys=subkeys,
            fwpkm_top_k=top_k,
            initializer_range=64**-0.5 / 3**0.5,  # of torch's own initial values of a Linear
            **options,
        )
        self.embed = nn.Embedding(symbols, 64)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.memory = FwpkmMemory(self.config, 0)
        self.memory.initialize_parameters(self.config)
        self.norm = nn.RMSNorm(64)

    def forward(self, symbols: Tensor, position: Tensor) -> Tensor:
        return self.norm(self.memory(self.embed(symbols)))[:, position] @ self.embed.weight.T


def draw(
    pairs: int, alphabet: int, batch: int, generator: torch.Generator, passes: int = 1, bindings: int = 1
) -> tuple[Tensor, Tensor]:
    """Symbols `[B, T]`, the pairs `passes` times, a chunk of filler, then every key with its value; and where keys are asked.

    With several bindings, the keys come first with other values, `bindings - 1` times; the last value is asked for.

    Keys are 0 ... alphabet - 1, each at most once a sequence; values are the next `alphabet` symbols; the last is filler.
    """
    keys = torch.rand(batch, alphabet, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(alphabet, 2 * alphabet, (batch, pairs), generator=generator)
    both = torch.stack([keys, values], 2)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    asked = both.gather(1, order[..., None].expand(-1, -1, 2)).flatten(1)
    filler = torch.full((batch, CHUNK), 2 * alphabet)
    earlier = [
        torch.stack([keys, torch.randint(alphabet, 2 * alphabet, (batch, pairs), generator=generator)], 2).flatten(1)
        for _ in range(bindings - 1)
    ]
    symbols = torch.cat([*earlier, *[both.flatten(1)] * passes, filler, asked], 1)
    position = torch.arange(symbols.shape[1] - asked.shape[1], symbols.shape[1], 2)
    return symbols, position


def train(model: Toy, pairs: int, alphabet: int, steps: int = 150, batch: int = 32, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(steps):
        symbols, position = draw(pairs, alphabet, batch, generator)
        logits = model(symbols, position)
        loss = F.cross_entropy(logits.flatten(0, 1), symbols[:, position + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def recall(
    model: Toy, pairs: int, alphabet: int, passes: int = 1, batch: int = 16, seed: int = 999, bindings: int = 1
) -> float:
    """Share of values that are the likeliest symbol, held-out sequences."""
    symbols, position = draw(pairs, alphabet, batch, torch.Generator().manual_seed(seed), passes, bindings)
    answers = model.eval()(symbols, position).argmax(-1)
    return (answers == symbols[:, position + 1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall of a FwPKM layer, seed 0, without a bar.")
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    for pairs, alphabet, options in (
        (64, 256, {"subkeys": 32}),
        (64, 256, {"subkeys": 32, "top_k": 2}),
        (32, 128, {"subkeys": 16}),
        (32, 128, {"subkeys": 16, "row_averaging": False}),
    ):
        torch.manual_seed(0)
        model = Toy(2 * alphabet + 1, **options)
        train(model, pairs, alphabet, steps)
        passes = ", ".join(f"{recall(model, 4 * pairs, alphabet, passes=n):.1%}" for n in (1, 2, 4))
        print(
            f"{pairs} pairs of {alphabet} symbols, {options}, {steps} steps: {recall(model, pairs, alphabet):.1%}; "
            f"{4 * pairs} pairs after 1, 2, 4 passes {passes}; "
            f"{pairs} keys bound four times {recall(model, pairs, alphabet, bindings=4):.1%}",
            flush=True,
        )
        if model.memory.config.row_averaging:
            model.memory.config.row_averaging = False
            print(f"    its row averaging switched off: {4 * pairs} pairs {recall(model, 4 * pairs, alphabet):.1%}")


if __name__ == "__main__":
    main()
