"""A few tokens of a matrix-valued recurrence in one Triton kernel: the fast weights are read once and written once.

This is the decoding step of the Falcon rules, the gated delta rule and linear attention. The floor is the traffic of
S; every program holds `[K, BLOCK_V]` of one head in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import may_overwrite_states

MOST_TOKENS = 16  # more are faster in chunks


@triton.jit
def _steps_kernel(
    q_pointer,
    x_pointer,
    v_pointer,
    strength_pointer,
    decay_pointer,
    S_pointer,
    new_S_pointer,
    o_pointer,
    tokens,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    REGRESSION: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    DECAY_FIRST: tl.constexpr,
    READ_AFTER_WRITE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sequence_head = tl.program_id(1).to(tl.int64)
    sequence, head = sequence_head // heads, sequence_head % heads
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows, in_columns = rows < K, columns < V
    inside = in_rows[:, None] & in_columns[None, :]
    at = sequence_head * K * V + rows[:, None] * V + columns[None, :]
    S = tl.load(S_pointer + at, mask=inside, other=0.0)
    for t in range(tokens):
        token = (sequence * tokens + t) * heads + head
        first_pair = (sequence * (tokens + WINDOW - 1) + t) * heads + head
        q = tl.load(q_pointer + token * K + rows, mask=in_rows, other=0.0).to(tl.float32)
        if PER_COLUMN:
            strength = tl.load(strength_pointer + token * V + columns, mask=in_columns, other=0.0)[None, :]
            decay = tl.load(decay_pointer + token * V + columns, mask=in_columns, other=1.0)[None, :]
        else:
            strength = tl.load(strength_pointer + token)
            decay = tl.load(decay_pointer + token)
        kept = S * decay
        seen = kept if DECAY_FIRST else S
        new = kept
        for j in tl.static_range(WINDOW):
            pair = first_pair + j * heads
            x = tl.load(x_pointer + pair * K + rows, mask=in_rows, other=0.0).to(tl.float32)
            written = tl.load(v_pointer + pair * V + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
            if REGRESSION:
                written = written - tl.sum(seen * x[:, None], 0)[None, :]
            new += x[:, None] * (strength * written)
        o = tl.sum((new if READ_AFTER_WRITE else S) * q[:, None], 0)
        tl.store(o_pointer + token * V + columns, o.to(o_pointer.dtype.element_ty), mask=in_columns)
        S = new
    tl.store(new_S_pointer + at, S, mask=inside)


def recurrent_steps(
    q: Tensor,
    x: Tensor,
    values: Tensor,
    strength: Tensor,
    decay: Tensor,
    S: Tensor,
    *,
    window: int = 1,
    regression: bool,
    decay_first: bool = False,
    read_after_write: bool = True,
) -> tuple[Tensor, Tensor]:
    """`S <- decay S + strength sum_j x_j e_j^T` token by token, e_j = v_j or the residual `v_j - S^T x_j`.

    Args:
        q: `[N, T, H, K]`. x, values: pairs `[N, T + W - 1, H, .]`; token t writes pairs t to t + W - 1.
        strength, decay: float32 `[N, T, H]`, or `[N, T, H, V]` for one a value column.
        S: float32 `[N, H, K, V]`, contiguous; overwritten within `contract.overwriting_states()`.
        window: W. regression: write residuals. decay_first: they see the decayed S.
        read_after_write: o_t = S_t^T q_t, otherwise S_{t-1}^T q_t.

    Returns: o `[N, T, H, V]` in the dtype of values, and the new S.
    """
    (batch, tokens, heads, k_size), v_size = q.shape, values.shape[3]
    q, x, values, strength, decay, S = (t.contiguous() for t in (q, x, values, strength, decay, S))
    new_S = S if may_overwrite_states() else torch.empty_like(S)
    o = values.new_empty(batch, tokens, heads, v_size)
    block_k = max(16, triton.next_power_of_2(k_size))
    # enough columns to fill a warp's 128-byte lines, few enough that S stays in registers
    block_v = min(triton.next_power_of_2(v_size), 32 if block_k <= 128 else 16)
    with torch.cuda.device_of(q):
        _steps_kernel[(triton.cdiv(v_size, block_v), batch * heads)](
            q,
            x,
            values,
            strength,
            decay,
            S,
            new_S,
            o,
            tokens,
            heads,
            K=k_size,
            V=v_size,
            WINDOW=window,
            REGRESSION=regression,
            PER_COLUMN=strength.ndim == 4,
            DECAY_FIRST=decay_first,
            READ_AFTER_WRITE=read_after_write,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
        )
    return o, new_S
