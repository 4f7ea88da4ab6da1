"""Every published hybrid in twelve layers: it builds, learns, generates, saves and loads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_model import ids, stream
from transformers import AutoModelForCausalLM

import fwzoo
from compare import error
from rows import small_options

MEMORIES = ["", "+FwPKM@2,6,10", "+PKM@6+FwPKM@2,10", "+FwMLP@2,6,10"]
CYCLES = ["GDN", "GDN,SWA", "GDN,FA"]
EVERYTHING = (
    "falcon1,falcon2,falcon3,falcon1a,falcon2a,falcon3a,gdn,la,fa,swa,lact,gdn+pkm@3+fwpkm@5+fwmlp@8+none@10",
    "falcon1,falcon2,falcon3,falcon1a,falcon2a,falcon3a,gdn,la,fa,swa,gdn,la+none@10",
)
LAYOUTS = [*map("".join, itertools.product(CYCLES, MEMORIES)), "falcon3a*3,swa", "falcon3,la*2,fa", *EVERYTHING]
LATER = {"pkm", "fwpkm", "fwmlp", "lact"} - {*fwzoo.registry.feed_forward_names(), *fwzoo.registry.mixer_options()}


def names(layout: str) -> set[str]:
    return {
        piece.partition("*")[0].lower() for part in layout.split("+") for piece in part.partition("@")[0].split(",")
    }


READY = [layout for layout in LAYOUTS if not names(layout) & LATER]


def tiny(layout: str) -> fwzoo.FwzooConfig:
    """Twelve small layers; the options of every family are those of its architecture's `tiny()`."""
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return fwzoo.FwzooConfig.from_layout(layout, num_hidden_layers=12, **{**small_options(), **sizes})


def test_only_what_is_not_there_yet_is_left_out() -> None:
    assert len(LAYOUTS) == 16 and {"GDN", "GDN,SWA", "GDN,FA", "falcon3a*3,swa", EVERYTHING[1]} <= set(READY)
    assert len(READY) == len(LAYOUTS) or LATER


@pytest.mark.parametrize("layout", READY)
def test_it_builds_learns_generates_saves_and_loads(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(layout))
    tokens = ids(2, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    model.eval()
    greedy = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens[:, :15], **greedy)
    assert torch.equal(expected, model.generate(tokens[:, :15], use_cache=False, **greedy))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and loaded.config.layout == model.config.layout
    assert torch.equal(loaded.generate(tokens[:, :15], **greedy), expected)
    with torch.no_grad():
        whole = loaded.double()(tokens).logits
    assert error(stream(loaded, tokens, [1, 7, 8, 20])[0], whole) < 1e-9
