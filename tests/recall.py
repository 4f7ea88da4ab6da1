"""The recall toy: key-value pairs, read once, asked for at least a chunk later. Embedding, one FwPKM layer, tied head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fwzoo
from fwzoo.modeling.memories.fwpkm import FwpkmMemory

CHUNK = 16


class Toy(nn.Module):
    """Symbols `[B, T]` to logits of some positions `[B, X, symbols]`: embedding, one FwPKM layer in a residual, norm, tied head."""

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
            initializer_range=64**-0.5 / 3**0.5,
            **options,
        )
        self.embed = nn.Embedding(symbols, 64)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.memory = FwpkmMemory(self.config, 0)
        for module in self.memory.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        self.memory.initialize_parameters(self.config)
        self.norm = nn.RMSNorm(64)

    def forward(self, symbols: Tensor, position: Tensor) -> Tensor:
        hidden = self.embed(symbols)
        return self.norm(hidden + self.memory(hidden))[:, position] @ self.embed.weight.T


def draw(pairs: int, alphabet: int, batch: int, generator: torch.Generator, passes: int = 1) -> tuple[Tensor, Tensor]:
    """Symbols `[B, T]`, the pairs `passes` times, a chunk of filler, then every key with its value; and where keys are asked.

    Keys are 0 ... alphabet - 1, each at most once a sequence; values are the next `alphabet` symbols; the last is filler.
    """
    keys = torch.rand(batch, alphabet, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(alphabet, 2 * alphabet, (batch, pairs), generator=generator)
    both = torch.stack([keys, values], 2)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    asked = both.gather(1, order[..., None].expand(-1, -1, 2)).flatten(1)
    filler = torch.full((batch, CHUNK), 2 * alphabet)
    symbols = torch.cat([*[both.flatten(1)] * passes, filler, asked], 1)
    position = torch.arange(symbols.shape[1] - asked.shape[1], symbols.shape[1], 2)
    return symbols, position


def train(model: Toy, pairs: int, alphabet: int, steps: int = 80, batch: int = 32, seed: int = 0) -> None:
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
def recall(model: Toy, pairs: int, alphabet: int, passes: int = 1, batch: int = 16, seed: int = 999) -> float:
    """Share of values that are the likeliest symbol, held-out sequences."""
    symbols, position = draw(pairs, alphabet, batch, torch.Generator().manual_seed(seed), passes)
    answers = model.eval()(symbols, position).argmax(-1)
    return (answers == symbols[:, position + 1]).float().mean().item()
