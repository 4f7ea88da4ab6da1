"""What it costs a pretrained model, before any training, that one of its layers sees a window only, and how an attention layer

begins best as a Falcon. Nats a token, on a CPU.

    python benchmarks/upcycle_layers.py SOURCE BOOK.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from fwzoo.conversion.upcycle import MEAN_OF_VALUES, hybrid, hybrid_config

FALCON_LAYERS = "1,6,9"


@torch.no_grad()
def loss(model: Any, tokens: torch.Tensor, first: int = 0) -> float:
    """Mean over the tokens that are predicted from more than `first`."""
    hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0, first:-1]
    pieces = zip(hidden.split(512), tokens[first + 1 :].split(512), strict=True)
    return torch.cat([F.cross_entropy(model.lm_head(h), t, reduction="none") for h, t in pieces]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a pretrained model without sliding windows")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--only", choices=["windows", "falcon"], help="one of the two tables")
    options = parser.parse_args()
    source = AutoModelForCausalLM.from_pretrained(options.source).eval()
    text = options.text.read_text(encoding="utf-8")[: 20 * options.tokens]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(options.source)(text).input_ids)[: options.tokens]
    weights = source.state_dict()
    if source.config.tie_word_embeddings:
        del weights["lm_head.weight"]

    def build(layout: str, **more: Any) -> Any:
        return hybrid(source.config, weights, hybrid_config(source.config, layout, **more))[0]

    if options.only != "falcon":
        window = options.window
        base = loss(source, tokens, window)
        print(f"beyond {window} tokens, source: {base:.4f}; more than that with a window of {window} in layer")
        for layer in [*map(str, range(source.config.num_hidden_layers)), "all"]:
            model = build("swa" if layer == "all" else f"fa+swa@{layer}", window=window)
            print(f"  {layer}: {loss(model, tokens, window) - base:+.4f}", flush=True)
    if options.only != "windows":
        print(
            f"{len(tokens)} tokens, source: {loss(source, tokens):.3f}; Falcon in layers {FALCON_LAYERS}, output norm times"
        )
        for rule, pairing in (("falcon1", "same_step"), ("falcon3a", "same_step"), ("falcon3a", "shifted")):
            model = build(f"fa+{rule}@{FALCON_LAYERS}", pairing=pairing)
            norms = [layer.mixer.norm.weight for layer in model.model.layers if hasattr(layer.mixer, "norm")]
            estimated = [norm.detach() / MEAN_OF_VALUES for norm in norms]
            for size in ("ones", 1.0, 0.5, 0.25, 0.0):
                for norm, x in zip(norms, estimated, strict=True):
                    norm.data = torch.ones_like(x) if size == "ones" else x * size
                print(f"  {rule}, {pairing}, {size}: {loss(model, tokens):.3f}", flush=True)


if __name__ == "__main__":
    main()
