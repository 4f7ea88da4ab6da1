"""Run as a program: load bundles where neither fwzoo nor any optional package can be imported, and without a network.

`python bundle_reader.py RESULTS AGAIN NAME ...`: for every NAME, a folder or a name on the Hub that HF_ENDPOINT serves on
this machine, what the loaded model makes of fixed tokens goes to `RESULTS/<last part of NAME>.safetensors`, and the model
is saved again to `AGAIN/<last part>`, unless AGAIN is `-`.
"""

import socket
import sys
from pathlib import Path


def alone() -> None:
    """From here on, nothing but torch and transformers can be imported, and no other machine can be reached."""
    for name in ("fwzoo", "triton", "fla", "einops", "peft", "accelerate", "rich", "typer"):
        sys.modules[name] = None  # type: ignore[assignment]
    connect = socket.socket.connect

    def connect_here(self, address):  # type: ignore[no-untyped-def]
        if self.family != socket.AF_INET or address[0] != "127.0.0.1":
            raise OSError(f"{address} is on a network")
        return connect(self, address)

    socket.socket.connect = connect_here  # type: ignore[method-assign]


def main(results: Path, again: str, names: list[str]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # as in the process of the tests: it changes orders of sums
    results.mkdir(exist_ok=True)
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, verify=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        assert type(model.model).__module__ == type(model).__module__ == type(model.config).__module__
        save_file(read(model), results / f"{Path(name).name}.safetensors")
        if again != "-":
            model.save_pretrained(Path(again) / Path(name).name)
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
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
