"""Attention and rotary embeddings, as of opset 23."""

from __future__ import annotations

import math
from typing import Any

import torch

from outofcore.onnx.operators.registry import Call, operator
from outofcore.onnx.storage import DTYPES


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """(batch, length, heads × size) as (batch, heads, length, size)."""
    return x.reshape(x.shape[0], x.shape[1], count, x.shape[2] // count).transpose(1, 2)


@operator("Attention")
def attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    past_key: torch.Tensor | None = None,
    past_value: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> Any:
    """Written out, step by step as the standard has it: only so are its outputs, and its precision, the right ones."""
    flat = q.dim() == 3
    if flat:
        heads, pairs = call.get("q_num_heads"), call.get("kv_num_heads")
        if not heads or not pairs:
            raise call.refuse("it has inputs of three dimensions and does not tell how many heads there are")
        q, k, v = _heads(q, heads), _heads(k, pairs), _heads(v, pairs)
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    key, value = k, v
    if k.shape[1] != q.shape[1]:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    root = math.sqrt(call.get("scale") or 1 / math.sqrt(q.shape[-1]))
    raw = torch.matmul(q * root, (k * root).transpose(-1, -2))
    wanted, mode = call.wants(3), call.get("qk_matmul_output_mode", 0)
    biased, capped = _biased(call, raw, mask, past_key, lengths)
    precision = DTYPES[call.get("softmax_precision")] if call.get("softmax_precision") else biased.dtype
    weights = torch.softmax(biased.to(precision), -1)
    # A query that may look at nothing gets nothing.
    blind = (biased == -math.inf).all(-1, keepdim=True)
    weights = torch.where(blind, torch.zeros_like(weights), weights).to(q.dtype)
    y = torch.matmul(weights, v)
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    shown = (raw, capped, biased, weights)[mode] if wanted else None
    return y, key, value, shown


def _biased(
    call: Call,
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    past: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that go into the softmax, and those that are capped and not masked."""
    cap = call.get("softcap", 0.0)
    capped = torch.tanh(scores / cap) * cap if cap > 0 else scores
    found = capped
    queries, keys = scores.shape[-2:]
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(scores.dtype)
        if mask.shape[-1] < keys:
            mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[-1]), value=-math.inf)
        found = found + mask
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    if call.get("is_causal", 0) or left >= 0 or right >= 0:
        row = torch.arange(queries, device=scores.device)[:, None]
        column = torch.arange(keys, device=scores.device)[None, :]
        first: Any = 0 if past is None else past.shape[2]
        if past is None and lengths is not None:
            first = lengths.reshape(-1, 1, 1, 1) - queries
        ahead = column - (row + first)
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if call.get("is_causal", 0):
            seen = seen & (ahead <= 0)
        if left >= 0:
            seen = seen & (-ahead <= left)
        if right >= 0:
            seen = seen & (ahead <= right)
        found = found.masked_fill(~seen, -math.inf)
    if lengths is not None:
        held = torch.arange(keys, device=scores.device) < lengths.reshape(-1, 1, 1, 1)
        found = found.masked_fill(~held, -math.inf)
    return found, capped


@operator("RotaryEmbedding")
def rotary_embedding(
    call: Call,
    x: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    flat = x.dim() == 3
    if flat:
        heads = call.get("num_heads", 0)
        if not heads:
            raise call.refuse("it has an input of three dimensions and does not tell how many heads there are")
        y = x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads)
    else:
        y = x.transpose(1, 2)
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
    turned = call.get("rotary_embedding_dim", 0) or y.shape[-1]
    rest = y[..., turned:]
    if call.get("interleaved", 0):
        a, b = y[..., 0:turned:2], y[..., 1:turned:2]
    else:
        a, b = y[..., : turned // 2], y[..., turned // 2 : turned]
    real, imaginary = cosines * a - sines * b, sines * a + cosines * b
    if call.get("interleaved", 0):
        found = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        found = torch.cat([real, imaginary], -1)
    found = torch.cat([found, rest], -1) if rest.shape[-1] else found
    return found.reshape(x.shape) if flat else found.transpose(1, 2)
