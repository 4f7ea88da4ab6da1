"""Run as a program: load bundles where neither fwzoo nor any optional package can be imported, and without a network.

`python bundle_reader.py SOURCE RESULTS [SAVE_AGAIN]`: for every folder in SOURCE, what the loaded model makes of fixed
tokens goes to `RESULTS/<folder>.safetensors`, and the model is saved again to `SAVE_AGAIN/<folder>`.
"""

import socket
import sys
from pathlib import Path


def alone() -> None:
    """From here on, nothing but torch and transformers can be imported, and nothing can be downloaded."""
    for name in ("fwzoo", "triton", "fla", "einops", "peft", "accelerate", "rich", "typer"):
        sys.modules[name] = None  # type: ignore[assignment]

    def no_network(*args: object) -> None:
        raise OSError("a bundle must load without a network")

    socket.socket.connect = no_network  # type: ignore[method-assign]


def main(source: Path, results: Path, save_again: Path | None) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    results.mkdir(exist_ok=True)
    for folder in sorted(source.iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, verify=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        assert type(model.model).__module__ == type(model).__module__ == type(model.config).__module__
        save_file(read(model), results / f"{folder.name}.safetensors")
        if save_again is not None:
            model.save_pretrained(save_again / folder.name)
    assert not any(name.startswith("fwzoo") for name in sys.modules if sys.modules[name] is not None)


def read(model):  # type: ignore[no-untyped-def]
    """Logits, greedy tokens, and the logits of a continuation from a cache, of fixed tokens."""
    import torch

    tokens = torch.randint(2, 384, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = model(tokens[:, :23], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        return {
            "logits": model(tokens).logits,
            "greedy": model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0),
            "continued": model(tokens[:, 23:], past_key_values=cache).logits,
        }


if __name__ == "__main__":
    alone()
    paths = [Path(argument) for argument in sys.argv[1:]]
    main(paths[0], paths[1], paths[2] if len(paths) > 2 else None)
