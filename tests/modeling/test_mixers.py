"""Softmax attention, the gated delta rule and linear attention as layers: against their formulas and other code."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_model import ids, stream
from torch import Tensor, nn

import fwzoo
from compare import error
from fwzoo.kernels.falcon import RULES
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.modeling.mixers.attention import KeyValues, attend, attend_at, by_length, slots
from rows import ROWS, Row


def layer(mixer: str, **options: Any) -> Any:
    """One mixer with weights of order one."""
    torch.manual_seed(0)
    return Row(mixer, "falcon1", {"mixers": [mixer] * 2, **options}).model().double().model.layers[0].mixer


def hidden(tokens: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# --- softmax attention ---

LENGTH = 8


def factor(kind: str, seen: int, scale: Tensor | None) -> Any:
    """The factor of the logits of a query that sees `seen` keys, as the definition states it."""
    if kind == "ssmax":
        assert scale is not None
        return scale * math.log(seen)
    if kind == "log" or (kind == "log_beyond" and seen > LENGTH):
        return math.log(seen) / math.log(LENGTH)
    if kind == "yarn" and seen > LENGTH:
        return (0.1 * math.log(seen / LENGTH) + 1) ** 2
    return 1.0


def by_the_formula(mixer: Any, x: Tensor, window: int | None) -> Tensor:
    """Softmax attention token by token and head by head; complex numbers turn the positions."""
    config = mixer.config
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    outputs = []
    for row in x:
        q, k, v = (
            p(row).view(len(row), n, -1)
            for p, n in zip((mixer.q_proj, mixer.k_proj, mixer.v_proj), (heads, groups, groups), strict=True)
        )
        if config.attention_qk_norm:
            q, k = (
                F.rms_norm(y, (size,), norm.weight, config.norm_eps)
                for y, norm in ((q, mixer.q_norm), (k, mixer.k_norm))
            )
        angle = torch.arange(len(row))[:, None].double() * config.rotary_base ** (
            -torch.arange(size // 2).double() * 2 / size
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (turn * torch.complex(*y.chunk(2, -1)) for y in (q, k))
        o = torch.zeros(len(row), heads, v.shape[-1], dtype=x.dtype)
        for t in range(len(row)):
            first = 0 if window is None else max(0, t - window + 1)
            for h in range(heads):
                g = h * groups // heads
                logits = (q[t, h].conj() * k[first : t + 1, g]).real.sum(-1) / math.sqrt(size)
                scale = None if mixer.logit_scale is None else mixer.logit_scale[h]
                logits = logits * factor(config.logit_scaling, t + 1 - first, scale)
                o[t, h] = logits.softmax(-1) @ v[first : t + 1, g]
        outputs.append(mixer.o_proj(o.flatten(1)))
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", ["none", "log", "log_beyond", "yarn", "ssmax"])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 40])
def test_attention_is_its_formula(kind: str, window: int | None) -> None:
    name = "full_attention" if window is None else "sliding_attention"
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "value_head_dim": 6, "attention_qk_norm": True}
    mixer = layer(name, attention_window=window or 3, logit_scaling=kind, training_length=LENGTH, **options)
    if kind == "ssmax":
        mixer.logit_scale.data.copy_(torch.tensor([0.2, 0.5, 1.0, 2.0]))
    x = hidden(29)
    with torch.no_grad():
        assert error(mixer(x), by_the_formula(mixer, x, window)) < 1e-9


@torch.no_grad()
def test_logit_scaling_changes_nothing_below_the_training_length_where_the_formula_says_so() -> None:
    x = hidden(3 * LENGTH)
    plain = layer("full_attention")(x)
    scaled = {
        kind: layer("full_attention", logit_scaling=kind, training_length=LENGTH)(x)
        for kind in ("log", "log_beyond", "yarn", "ssmax")
    }
    for kind in ("log_beyond", "yarn"):
        assert torch.equal(scaled[kind][:, :LENGTH], plain[:, :LENGTH])
    for kind, y in scaled.items():
        assert error(y[:, LENGTH - 1], plain[:, LENGTH - 1]) < 1e-7, "at the training length every factor is 1"
        assert error(y[:, LENGTH:], plain[:, LENGTH:]) > 1e-3, kind
    assert error(scaled["log"][:, 1 : LENGTH - 1], plain[:, 1 : LENGTH - 1]) > 1e-3
    assert error(scaled["log"], scaled["ssmax"]) < 1e-7, "ssmax starts at 1 / log L"


def test_swa_probability_restricts_training_steps_only() -> None:
    x = hidden(20)
    full, window = layer("full_attention"), layer("sliding_attention", attention_window=4)
    never, always, half = (layer("full_attention", attention_window=4, swa_probability=p) for p in (0.0, 1.0, 0.5))
    assert error(full(x), window(x)) > 1e-3
    for mixer in (never, always, half):
        assert torch.equal(mixer(x), full(x))  # not in training
        mixer.train()
    assert torch.equal(never(x), full(x)) and torch.equal(always(x), window(x))
    restricted = [torch.equal(half(x), window(x)) for _ in range(200)]
    assert all(torch.equal(half(x), window(x)) or torch.equal(half(x), full(x)) for _ in range(5))
    assert 70 < sum(restricted) < 130


def test_swa_probability_with_gradient_checkpointing_draws_once() -> None:
    row = Row("swa", "falcon1", {"mixers": ["full_attention"] * 2, "attention_window": 3, "swa_probability": 0.5})
    tokens = ids(2, 30)
    grads: dict[Any, list[Tensor]] = {}
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = row.model().train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
        for seed in range(6):
            torch.manual_seed(seed)
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            grads.setdefault(seed, []).append(model.model.layers[0].mixer.q_proj.weight.grad.clone())
    for plain, *others in grads.values():
        assert all(torch.equal(plain, x) for x in others)


@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 10, 11, 23])
@pytest.mark.parametrize("window", [1, 2, 5, 23])
def test_blocks_of_a_window_equal_one_masked_product(window: int, tokens: int) -> None:
    q, k, v = (torch.randn(2, heads, tokens, 4).double() for heads in (4, 2, 2))
    position = torch.arange(tokens).expand(2, -1)
    assert error(attend(q, k, v, window), attend_at(q, k, v, position, position, window)) < 1e-12


def test_slots_of_the_ring() -> None:
    count = torch.tensor([0, 2, 4, 5, 11])
    assert slots(count, 4, 4).tolist() == [
        [-1, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 1, 2, 3],
        [4, 1, 2, 3],
        [8, 9, 10, 7],
    ]
    assert slots(count[:3], 5, None).tolist() == [[-1] * 5, [0, 1, -1, -1, -1], [0, 1, 2, 3, -1]]


@torch.no_grad()
def test_a_window_wider_than_the_text_is_full_attention_and_a_narrow_one_is_not() -> None:
    models = [
        Row("", "falcon1", {"mixers": [name] * 2, "attention_window": window}).model()
        for name, window in (("full_attention", 1), ("sliding_attention", 30), ("sliding_attention", 29))
    ]
    full, wide, narrow = (model(ids(2, 30)).logits for model in models)
    assert error(wide, full) < 1e-6
    assert torch.equal(wide[:, :29], narrow[:, :29]) or error(wide[:, :29], narrow[:, :29]) < 1e-6
    assert error(narrow[:, 29], full[:, 29]) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", ["full_attention", "sliding_attention"])
def test_decoding_after_prefill_equals_one_forward_at_every_border(name: str) -> None:
    window = 7
    model = Row("", "falcon1", {"mixers": [name, "gated_delta"], "attention_window": window}).model().double()
    sizes = (1, window - 1, window, window + 1, 2 * window + 3)
    for n in sizes:
        for m in sizes:
            tokens = ids(2, n + m)
            one_by_one, _ = stream(model, tokens, [n, *range(n + 1, n + m)])
            assert error(one_by_one, model(tokens).logits) < 1e-9


@torch.no_grad()
def test_sixteen_bit_positions_stay_exact() -> None:
    """Rotary angles of late positions in bfloat16 would be off by whole turns; they are computed in float32."""
    mixer = layer("sliding_attention", attention_window=4).float()
    x = hidden(3000, batch=1).float()
    exact, narrow = mixer(x), mixer.bfloat16()(x.bfloat16()).float()
    assert error(narrow[:, -500:], exact[:, -500:]) < 2 * error(narrow[:, :500], exact[:, :500])


@torch.no_grad()
@pytest.mark.parametrize("name", ["full_attention", "sliding_attention"])
def test_packed_documents_continue_packed_as_each_would_alone(name: str) -> None:
    model = Row("", "falcon1", {"mixers": [name, "linear_attention"], "attention_window": 4}).model().double()
    lengths = ([9, 0, 1, 17, 2], [3, 5, 0, 1, 20])
    parts = [ids(1, sum(sizes), seed=i) for i, sizes in enumerate(lengths)]
    cache = fwzoo.FastWeightCache(model.config)
    packed = []
    for tokens, sizes in zip(parts, lengths, strict=True):
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        logits = model(tokens, cu_seq_lens_q=bounds, use_cache=True, **{CACHE_KEY: cache}).logits
        packed.append(logits.split(sizes, 1))
    for n in range(5):
        alone = model(torch.cat([tokens.split(sizes, 1)[n] for tokens, sizes in zip(parts, lengths, strict=True)], 1))
        assert error(torch.cat([packed[0][n], packed[1][n]], 1), alone.logits) < 1e-9


def test_packed_documents_are_padded_to_less_than_twice_their_length() -> None:
    calls = []

    def record(q: Tensor, k: Tensor, v: Tensor, past: KeyValues, mask: Tensor | None, bounds: list[int]) -> Any:
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        calls.append((max(sizes), min(sizes), q[0, :, 0, 0].tolist()))
        return q, past

    lengths = [100, 3, 1, 0, 64, 127, 2, 40]
    bounds = [0, *itertools.accumulate(lengths)]
    x = torch.arange(bounds[-1]).double()[None, :, None, None]
    past = KeyValues(torch.zeros(8, 1, 0, 1), torch.zeros(8, 1, 0, 1), torch.arange(8))
    o, new = by_length(record, x, x, x, past, None, bounds)
    assert torch.equal(o, x) and torch.equal(new.count, past.count)
    assert all(longest < 2 * max(shortest, 1) for longest, shortest, _ in calls)
    assert sorted(t for *_, tokens in calls for t in tokens) == list(range(bounds[-1]))


# --- the gated delta rule ---


def test_the_gated_delta_layer_equals_transformers_own_on_the_same_weights() -> None:
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mixer = layer("gated_delta", value_head_dim=24).float()
    heads, k_size, v_size = mixer.heads, mixer.key_size, mixer.value_size
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=32,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=k_size,
            linear_value_head_dim=v_size,
            linear_conv_kernel_dim=mixer.conv.size,
            rms_norm_eps=mixer.config.norm_eps,
        ),
        layer_idx=0,
    )

    def by_head(*matrices: nn.Linear) -> Tensor:
        return torch.cat([m.weight.unflatten(0, (heads, -1)) for m in matrices], 1).flatten(0, 1)

    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(by_head(mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.gate_proj))
        theirs.in_proj_ba.weight.copy_(by_head(mixer.b_proj, mixer.a_proj))
        theirs.conv1d.weight.copy_(mixer.conv.weight[:, None])
        theirs.A_log.copy_(mixer.log_rate)
        theirs.dt_bias.copy_(mixer.dt_bias)
        theirs.norm.weight.copy_(mixer.norm.weight)
        theirs.out_proj.weight.copy_(mixer.o_proj.weight)
        x = hidden(100).float()
        assert error(mixer(x), theirs(x)) < 1e-5
        mixer.dt_bias += 0.1
        assert error(mixer(x), theirs(x)) > 1e-4


# --- linear attention ---


@torch.no_grad()
@pytest.mark.parametrize("feature", ["elu1", "relu", "softplus"])
def test_linear_attention_is_softmax_attention_with_another_kernel(feature: str) -> None:
    mixer = layer("linear_attention", linear_feature_map=feature)
    x = hidden(20)
    phi = {"elu1": lambda y: F.elu(y) + 1, "relu": F.relu, "softplus": F.softplus}[feature]
    q, k, v = (p(x).unflatten(-1, (2, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    weight = torch.einsum("bthk,bshk->bhts", phi(q), phi(k)).tril()
    o = torch.einsum("bhts,bshv->bthv", weight / (weight.sum(-1, keepdim=True) + 1e-6), v)
    assert error(mixer(x), mixer.o_proj(mixer.norm(o).flatten(2))) < 1e-9


@torch.no_grad()
def test_an_identity_state_reads_the_query_back() -> None:
    options = {"linear_feature_map": "identity", "linear_normalize": False}
    x = hidden(1)
    found, empty = (layer("linear_attention", linear_initial_state=s, **options) for s in ("identity", "zeros"))
    q, k, v = (p(x).unflatten(-1, (2, -1)) for p in (found.q_proj, found.k_proj, found.v_proj))
    written = (q * k).sum(-1, keepdim=True) * v
    assert error(empty(x), found.o_proj(found.norm(written).flatten(2))) < 1e-9
    assert error(found(x), found.o_proj(found.norm(q + written).flatten(2))) < 1e-9


def test_learned_decay_starts_at_its_initial_value() -> None:
    for kind in ("head", "token"):
        config = Row("", "falcon1", {"mixers": ["linear_attention"] * 2, "linear_decay": kind}).config()
        torch.manual_seed(0)
        model = fwzoo.Falcon1ForCausalLM(config)
        decay = model.model.layers[0].mixer._log_decay(torch.zeros(1, 1, 32)).exp()
        assert decay.shape == (1, 1, 2) and error(decay, torch.full_like(decay, 0.999)) < 1e-6


@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in RULES], ids=lambda row: row.name)
def test_autocast_keeps_state_and_operators_in_float32(row: Row) -> None:
    model, tokens = row.model().train(), ids(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
        _, cache = stream(model.eval(), tokens, [17])
        generated = model.generate(tokens[:, :9], max_new_tokens=5, do_sample=False)
    loss.backward()
    assert generated.shape == (2, 14) and error(loss, model(tokens, labels=tokens).loss) < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    states = [x for layer in cache.layers for name, x in layer.tensors.items() if name in ("mixer.S", "mixer.z")]
    assert all(x.dtype == torch.float32 for x in states)


@pytest.mark.parametrize("level", ["reference", "chunk"])
def test_autocast_does_not_reach_the_operators(level: str) -> None:
    q, k, v = (torch.rand(2, 40, 2, 8) for _ in range(3))
    gates = -torch.rand(2, 40, 2), torch.rand(2, 40, 2)
    for call in (
        lambda: fwzoo.kernels.gated_delta(q, F.normalize(k, dim=-1), v, *gates, level=level),
        lambda: fwzoo.kernels.linear_attention(q, k, v, level=level),
    ):
        expected, state = call()
        with torch.autocast("cpu", torch.bfloat16):
            found, new = call()
        assert torch.equal(found, expected) and all(torch.equal(x, y) for x, y in zip(new, state, strict=True))


def test_state_bytes_are_those_of_the_documented_formulas() -> None:
    heads, groups, k, v, window, width = 4, 2, 8, 12, 7, 3
    layers = ["gated_delta", "linear_attention", "sliding_attention", "full_attention"]
    options = {"num_attention_heads": heads, "num_key_value_heads": groups, "value_head_dim": v}
    options.update(num_hidden_layers=4, mixers=layers, attention_window=window, short_conv_size=width)
    for dtype, e in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = Row("", "falcon1", options).model().to(dtype)
        assert model.state_bytes() == [
            4 * heads * k * v + e * heads * (width - 1) * (2 * k + v),
            4 * heads * k * (v + 1),
            e * groups * window * (k + v) + 8,
            e * groups * (k + v) + 8,
        ]
        assert [row[2] for row in model.kernel_report()] == ["chunk", "chunk", "sdpa", "sdpa"]
