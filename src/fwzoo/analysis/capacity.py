"""How many associations does a memory hold? Interference over signal when random unit keys recall random values.

Two kinds of memory are measured. A *store* is a formula: for a query x it weighs every stored pair by a function of the
scores x . k_i. A *memory* is an operator of the zoo that has written the pairs one after the other.

Axis letters: R draws, Q queries, M stored pairs, K key size, V value size.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..kernels.falcon import RULES

SCORES = 1 << 22  # scores of queries with keys that are there at once
TRAINED = 1024  # pairs up to which the growing softmax stores have the plain temperature
CHUNK = 16  # tokens between updates of the memories that write by chunks
ROWS = 16  # independent memories, or small stores, that a ratio is a mean over

Advance = Callable[[int], object]


# --- stores: the weight of a pair is a function of its score ---


@dataclass(frozen=True)
class Store:
    """Recall `sum_i w_i v_i` with `w_i = weight(x . k_i, b)`, up to a factor that all pairs share.

    Attributes:
        recall: the recall as a formula, for tables.
        weight: scores `[..., M]` and b to weights.
        growth: b over sqrt(K) when M pairs are stored.
    """

    recall: str
    weight: Callable[[Tensor, float], Tensor]
    growth: Callable[[int], float] = lambda pairs: 1.0

    def beta(self, size: int, pairs: int) -> float:
        """b for keys of `size` and so many pairs."""
        return math.sqrt(size) * self.growth(pairs)


def _series(scores: Tensor, beta: float, terms: int) -> Tensor:
    x = beta * scores
    total = torch.ones_like(x)
    for n in range(terms - 1, 0, -1):
        total = total * (x / n) + 1
    return total


def _log(pairs: int) -> float:
    return max(1.0, math.log(pairs) / math.log(TRAINED))


def _yarn(pairs: int) -> float:
    return (0.1 * max(0.0, math.log(pairs / TRAINED)) + 1) ** 2


def _softmax(scores: Tensor, beta: float) -> Tensor:
    return ((scores - 1) * beta).exp_()  # the divisor is the same for all pairs


STORES: dict[str, Store | None] = {
    "outer_product": Store("Vᵀ K x", lambda s, _: s),
    "optimal_linear": None,  # the one whose weights need all keys at once
    "relu": Store("Vᵀ relu(Kx)", lambda s, _: s.relu()),
    "squared_relu": Store("Vᵀ relu(Kx)²", lambda s, _: s.relu().square()),
    "swiglu": Store("Vᵀ (silu(Kx) ⊙ Kx)", lambda s, _: F.silu(s) * s),
    "cubed_relu": Store("Vᵀ relu(Kx)³", lambda s, _: s.relu() ** 3),
    "softmax": Store("Vᵀ softmax(βKx), β = √K", _softmax),
    "softmax_log": Store(f"softmax, β·log M / log {TRAINED} beyond", _softmax, _log),
    "softmax_yarn": Store(f"softmax, β·(0.1 log(M / {TRAINED}) + 1)² beyond", _softmax, _yarn),
    "series2": Store("Vᵀ (1 + βKx)", functools.partial(_series, terms=2)),
    "series3": Store("exp(βKx) to 3 terms", functools.partial(_series, terms=3)),
    "series4": Store("exp(βKx) to 4 terms", functools.partial(_series, terms=4)),
}
OPTIMAL = "Vᵀ (Kᵀ)⁺ x"


@dataclass
class Held:
    """What was measured of one store or memory.

    Attributes:
        ratio_at: number of stored pairs to interference over signal, infinite where nothing is recalled.
        bytes_at: number of stored pairs to the bytes of a memory's state.
    """

    ratio_at: dict[int, float] = field(default_factory=dict)
    bytes_at: dict[int, int] = field(default_factory=dict)

    @property
    def capacity(self) -> float | None:
        """The number of pairs at which the ratio reaches 1, interpolated on log axes.

        None when it never does; 0 when it is above 1 from the fewest pairs on.
        """
        last = None
        for pairs, ratio in sorted(self.ratio_at.items()):
            if ratio >= 1:
                if last is None:
                    return 0.0
                share = -math.log(last[1]) / (math.log(ratio) - math.log(last[1])) if last[1] > 0 else 1.0
                return last[0] * (pairs / last[0]) ** share
            last = (pairs, ratio)
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state where the capacity is reached, or with the most pairs."""
        capacity = self.capacity
        counts = sorted(self.bytes_at)
        return self.bytes_at[next((m for m in counts if capacity is not None and m >= capacity), counts[-1])]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {str(m): None if math.isinf(r) else r for m, r in self.ratio_at.items()}
        found: dict[str, Any] = {"capacity": self.capacity, "ratio_at": ratios}
        if self.bytes_at:
            found["state_bytes"] = self.state_bytes
            found["bytes_at"] = {str(m): n for m, n in self.bytes_at.items()}
        return found

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Held:
        """The inverse of `as_dict`."""
        ratios = {int(m): math.inf if r is None else r for m, r in found["ratio_at"].items()}
        return cls(ratios, {int(m): n for m, n in found.get("bytes_at", {}).items()})


def pair_counts(most: int, multiple: int = 1, least: int = 4) -> list[int]:
    """Numbers of pairs to measure: two an octave from `least` to `most`, which is the last one."""
    least = max(least, multiple)
    counts = {round(least * 2 ** (i / 2) / multiple) * multiple for i in range(int(2 * math.log2(most / least)) + 1)}
    return sorted({m for m in counts if m <= most} | {most // multiple * multiple})


def measure_stores(
    size: int = 64,
    counts: Sequence[int] = (),
    *,
    queries: int = 256,
    seed: int = 0,
    names: Iterable[str] = tuple(STORES),
    advance: Advance = lambda keys: None,
) -> dict[str, Held]:
    """Interference over signal of every store, by number of stored pairs; a mean over stored keys as queries.

    Keys are drawn and forgotten block by block. Where fewer pairs are stored than there are queries, several
    independent stores make up for them.

    Args:
        size: K. counts: numbers of pairs; empty means `pair_counts(2_000_000)`.
        queries: least number of queries behind every mean. names: which stores.
        advance: called with the number of keys of every block.
    """
    counts = sorted(counts or pair_counts(2_000_000))
    held = {name: Held() for name in names}
    generator = torch.Generator().manual_seed(seed)
    few = [m for m in counts if m < queries]
    for group in (*([m] for m in few), counts[len(few) :]):
        if group:
            _stream(held, size, group, draws(group[0], queries), min(group[0], queries), generator, advance)
    return held


def draws(pairs: int, queries: int) -> int:
    """How many independent stores of so many pairs are measured: one where all queries fit into it."""
    return 1 if pairs >= queries else max(ROWS, -(-queries // pairs))


def _stream(
    held: dict[str, Held],
    size: int,
    counts: list[int],
    rows: int,
    queries: int,
    generator: torch.Generator,
    advance: Advance,
) -> None:
    """Add to `held` the ratios of ever larger stores; their first `queries` keys are the queries."""
    asked = unit_keys((rows, queries, size), generator)
    own_scores = (asked * asked).sum(-1)
    sums: dict[tuple[str, float], Tensor] = {}
    gram = torch.zeros(rows, size, size, dtype=torch.float64)
    block = max(1, SCORES // (rows * queries))
    keys, stored = asked, 0
    for count in counts:
        while stored < count:
            if stored:
                keys = unit_keys((rows, min(block, count - stored), size), generator)
            scores = asked @ keys.mT
            for name in held:
                if (store := STORES[name]) is None:
                    continue
                for beta in {store.beta(size, m) for m in counts if m >= count}:
                    weights = store.weight(scores, beta)
                    if not stored:
                        weights.diagonal(dim1=-2, dim2=-1).zero_()
                    sums[name, beta] = weights.square().sum(-1).double() + sums.get((name, beta), 0)
            if "optimal_linear" in held:
                gram += keys.double().mT @ keys.double()
            stored += keys.shape[1]
            advance(keys.shape[1] * rows)
        for name in held:
            if (store := STORES[name]) is None:
                ratio = _pseudo_inverse_ratio(gram, asked.double())
            else:
                beta = store.beta(size, count)
                ratio = sums[name, beta].sqrt() / store.weight(own_scores, beta)
            held[name].ratio_at[count] = ratio.mean().item()


def _pseudo_inverse_ratio(gram: Tensor, asked: Tensor) -> Tensor:
    """The ratio of weights `(Kᵀ)⁺ x`: with G = KᵀK, the own weight is h = xᵀG⁺x, and all squares add up to h too."""
    own = (asked @ torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) * asked).sum(-1)
    return (1 / own - 1).clamp(min=0).sqrt()


def unit_keys(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random directions of length 1 along the last axis."""
    return F.normalize(torch.randn(shape, generator=generator), dim=-1)


# --- memories: the zoo's own operators ---

Step = Callable[[Any, Tensor, Tensor, Tensor, float], tuple[Tensor, Any]]
"""`step(state, q, k, v, gain)`: read with q and write pairs k, v `[B, T, .]` with a gain of 0 or 1: output and state."""


def falcon_step(rule: str) -> Step:
    """A Falcon rule without forgetting: gain 1, ridge 0, every key paired with its own value."""

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
        q, k, v = (x[:, :, None] for x in (q, k, v))
        ridge = q.new_zeros(q.shape[:3])
        beta = torch.full_like(v if RULES[rule].per_column else ridge, gain)
        options: dict[str, Any] = {"rule": rule, "pairing": "same_step", "eps": 0.0, "state": state}
        o, state = kernels.falcon(q, k, v, beta, ridge, **options)
        return o[:, :, 0], state

    return step


def linear_step(feature: Callable[[Tensor], Tensor], normalize: bool) -> Step:
    """Linear attention without decay."""

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
        q, k, v = (x[:, :, None] for x in (feature(q), gain * feature(k), v))
        o, state = kernels.linear_attention(q, k, v, normalize=normalize, state=state)
        return o[:, :, 0], state

    return step


def gated_delta_step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
    """The delta rule: gain 1, no decay."""
    q, k, v = (x[:, :, None] for x in (q, k, v))
    decay = q.new_zeros(q.shape[:3])
    o, state = kernels.gated_delta(q, k, v, decay, torch.full_like(decay, gain), scale=1.0, state=state)
    return o[:, :, 0], state


def attention_step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
    """Softmax attention over everything, with logits √K x . k: the state is every key and value."""
    held = state
    if gain:
        held = (k, v) if state is None else tuple(torch.cat(both, 1) for both in zip(state, (k, v), strict=True))
    o = F.scaled_dot_product_attention(q, held[0], held[1], scale=math.sqrt(q.shape[-1]))
    return o, held


def lact_step(size: int, rates: tuple[float, float, float], prenorm: bool, generator: torch.Generator) -> Step:
    """LaCT's SwiGLU with fixed rates of W0, W1, W2, its initial weights drawn as the layer draws dense ones."""
    weights = tuple(torch.randn(1, size, size, generator=generator) * size**-0.5 for _ in range(3))

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
        q, k, v = (x[:, :, None] for x in (q, k, v))
        each = (torch.full_like(q[..., :1], gain * rate) for rate in rates)
        o, state = kernels.lact(q, k, v, *each, *weights, chunk_size=CHUNK, prenorm=prenorm, state=state)
        return o[:, :, 0], state

    return step


def fwpkm_step(size: int, subkeys: int, generator: torch.Generator) -> Step:
    """FwPKM with `subkeys` squared slots, every pair written to the slots of its own key."""
    bound = size**-0.5
    keys = (2 * torch.rand(2, 1, subkeys, size // 2, generator=generator) - 1) * bound
    values = 0.02 * torch.randn(subkeys**2, size, generator=generator)
    options: dict[str, Any] = {
        "chunk_size": CHUNK,
        "lookahead": False,
        "normalize_targets": False,
        "top_k": min(8, subkeys),
    }

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
        gate = torch.full(q.shape[:2], gain)
        return kernels.fwpkm((k if gain else q)[:, :, None], v, gate, keys, values, state=state, **options)

    return step


def fwmlp_step(size: int, rate: float, generator: torch.Generator) -> Step:
    """FwMLP as wide as its keys; a reading call is shorter than a chunk and writes nothing."""
    w_gate, w_up, w_down = (torch.randn(size, size, generator=generator) * size**-0.5 for _ in range(3))
    zero = torch.zeros(size)
    options: dict[str, Any] = {"chunk_size": CHUNK, "lookahead": False, "normalize_targets": False, "lr": rate}

    def step(state: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> tuple[Tensor, Any]:
        return kernels.fwmlp(k if gain else q, v, w_gate, zero, w_up, zero, w_down, zero, state=state, **options)

    return step


def memory_steps(size: int = 64, seed: int = 0) -> dict[str, Step]:
    """The zoo's memories by name, for keys and values of `size`."""
    generator = torch.Generator().manual_seed(seed)
    steps: dict[str, Step] = {rule: falcon_step(rule) for rule in RULES}
    steps["gated_delta"] = gated_delta_step
    steps["linear_attention"] = linear_step(lambda x: F.elu(x) + 1, normalize=True)
    steps["linear_attention_identity"] = linear_step(lambda x: x, normalize=False)
    steps["lact"] = lact_step(size, (1.0, 1.0, 1.0), False, generator)
    steps["lact_prenorm_w1"] = lact_step(size, (0.0, 100.0, 0.0), True, generator)
    steps["fwmlp"] = fwmlp_step(size, 1.0, generator)
    for subkeys in (8, 16, 32, 64):
        steps[f"fwpkm_{subkeys**2}_slots"] = fwpkm_step(size, subkeys, generator)
    steps["full_attention"] = attention_step
    return steps


@torch.no_grad()
def measure_memory(
    step: Step,
    size: int = 64,
    counts: Sequence[int] = (),
    *,
    queries: int = 256,
    seed: int = 0,
    advance: Advance = lambda keys: None,
) -> Held:
    """Interference over signal after M writes, of what a memory recalls for keys it was given.

    Values are standard normal. Of what is read, the part along the pair's own value is signal, everything else
    interference; both are means over keys spread evenly over all that were written (256 at most).

    Args:
        size: K and V. counts: numbers of pairs, multiples of `CHUNK`; empty means `pair_counts(4096, CHUNK)`.
    """
    counts = sorted(counts or pair_counts(4096, CHUNK))
    generator = torch.Generator().manual_seed(seed)
    keys = unit_keys((ROWS, counts[-1], size), generator)
    values = torch.randn(ROWS, counts[-1], size, generator=generator)
    held, state, stored = Held(), None, 0
    for count in counts:
        new = slice(stored, count)
        _, state = step(state, keys[:, new], keys[:, new], values[:, new], 1.0)
        asked = torch.linspace(0, count - 1, min(CHUNK, -(-queries // ROWS))).round().long()
        q, v = keys[:, asked], values[:, asked]
        read, _ = step(state, q, torch.zeros_like(q), torch.zeros_like(v), 0.0)
        own = (read * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True)
        rest = (read - own * v).square().sum(-1).mean() / (size - 1)
        signal = own.mean().item()
        held.ratio_at[count] = rest.sqrt().item() / signal if signal > 0 else math.inf
        held.bytes_at[count] = sum(x.numel() * x.element_size() for x in state) // ROWS
        advance((count - stored) * ROWS)
        stored = count
    return held


# --- both together ---


@dataclass
class CapacityReport:
    """What `fwzoo capacity` measured, for keys of `size`: `stores` and `memories` by name."""

    size: int
    stores: dict[str, Held]
    memories: dict[str, Held]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"stores": {NAME: {"capacity", "ratio_at"}}, "memories": {NAME: {.., "state_bytes", "bytes_at"}}}`."""
        groups: dict[str, Mapping[str, Held]] = {"stores": self.stores, "memories": self.memories}
        return {group: {name: held.as_dict() for name, held in found.items()} for group, found in groups.items()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write `capacity.json` and, with matplotlib, `capacity.png` into `folder`; returns the files written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "capacity.json"]
        written[0].write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return written
        figure = Figure(figsize=(15, 6), layout="constrained")
        panels = figure.subplots(1, 2)
        titles = ("stores: weights of scores", "the zoo's memories after M writes")
        for axes, held, title in zip(panels, (self.stores, self.memories), titles, strict=True):
            _plot(axes, held, f"{title}, K = {self.size}")
        written.append(folder / "capacity.png")
        figure.savefig(written[-1], dpi=120)
        return written


def _plot(axes: Any, found: Mapping[str, Held], title: str) -> None:
    styles = ("-", "--", ":")
    for i, (name, held) in enumerate(found.items()):
        points = [(m, r) for m, r in sorted(held.ratio_at.items()) if 1e-5 < r < math.inf]
        if points:
            axes.loglog(*zip(*points, strict=True), color=f"C{i % 10}", linestyle=styles[i // 10 % 3], label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="stored pairs M", ylabel="interference / signal")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
