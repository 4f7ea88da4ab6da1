"""FwPKM on a CPU: how much memory one call takes beside its table.

Run: python benchmarks/memory_peak.py [--batch 8] [--tokens 4096]   (Linux: it reads the peak from /proc)

Prints MiB of the table (512 x 512 rows of 512, float32), of the peak of resident memory above that before the call, of the rows
that the memories hold afterwards, and of the whole state.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from fwzoo.kernels import fwpkm

N, K, V = 512, 64, 512
MIB = 1 << 20


def resident(field: str) -> float:
    """MiB of a field of /proc/self/status: VmRSS now, VmHWM at its highest since the peak was reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    batch, tokens = arguments.batch, arguments.tokens
    keys, values = 0.1 * torch.randn(2, 1, N, K // 2), 0.02 * torch.randn(N * N, V)
    q, v, gate = torch.randn(batch, tokens, 1, K), torch.randn(batch, tokens, V), torch.rand(batch, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    _, state = fwpkm(q, v, gate, keys, values)
    peak = resident("VmHWM") - before
    held = int((state.slots < N * N).sum())
    row = V * state.shared_rows.element_size()
    print(f"{batch} sequences of {tokens:,} tokens, table {values.nbytes / MIB:.0f} MiB")
    print(
        f"peak added {peak:.0f} MiB, {held:,} rows held {held * row / MIB:.0f} MiB, state {sum(x.nbytes for x in state) / MIB:.0f} MiB"
    )


if __name__ == "__main__":
    main()
