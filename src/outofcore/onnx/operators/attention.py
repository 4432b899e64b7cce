"""Attention and rotary embeddings, as of opset 23."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outofcore.onnx.operators.registry import Unsupported, operator

_NO_HEADS = "its input has three dimensions, and the number of heads is missing"


def _split_heads(x: Tensor, count: int) -> Tensor:
    """Reshape (batch, length, heads × size) to (batch, heads, length, size)."""
    return x.reshape(x.shape[0], x.shape[1], count, x.shape[2] // count).transpose(1, 2)


@dataclass(frozen=True)
class AttentionAttributes:
    count: int  # of the outputs in use
    q_num_heads: int = 0
    kv_num_heads: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    is_causal: int = 0
    left_window_size: int = -1
    right_window_size: int = -1
    softmax_precision: torch.dtype | None = None
    qk_matmul_output_mode: int = 0


@operator("Attention", many=True, attributes=AttentionAttributes)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    asked: AttentionAttributes,
) -> Any:
    """Compute attention as ONNX defines it; return the result, all keys and values, and scores if requested."""
    flat = q.dim() == 3
    if flat:
        if not asked.q_num_heads or not asked.kv_num_heads:
            raise Unsupported(_NO_HEADS)
        q, k, v = (
            _split_heads(q, asked.q_num_heads),
            _split_heads(k, asked.kv_num_heads),
            _split_heads(v, asked.kv_num_heads),
        )
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    key, value = k, v
    if k.shape[1] != q.shape[1]:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    root = math.sqrt(asked.scale or 1 / math.sqrt(q.shape[-1]))
    raw = torch.matmul(q * root, (k * root).transpose(-1, -2))
    capped = torch.tanh(raw / asked.softcap) * asked.softcap if asked.softcap > 0 else raw
    biased = capped if mask is None else capped + _mask_bias(mask, raw)
    first: Any = 0 if past_key is None else past_key.shape[2]
    if past_key is None and lengths is not None:
        first = lengths.reshape(-1, 1, 1, 1) - raw.shape[-2]
    visible = _visible_keys(raw, first, asked.left_window_size, 0 if asked.is_causal else asked.right_window_size)
    if visible is not None:
        biased = biased.masked_fill(~visible, -math.inf)
    if lengths is not None:
        present = torch.arange(raw.shape[-1], device=raw.device) < lengths.reshape(-1, 1, 1, 1)
        biased = biased.masked_fill(~present, -math.inf)
    weights = torch.softmax(biased.to(asked.softmax_precision or biased.dtype), -1)
    # A query that attends to no key gets zeros.
    blind = (biased == -math.inf).all(-1, keepdim=True)
    weights = torch.where(blind, torch.zeros_like(weights), weights).to(q.dtype)
    y = torch.matmul(weights, v)
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    return y, key, value, (raw, capped, biased, weights)[asked.qk_matmul_output_mode] if asked.count > 3 else None


def _mask_bias(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(scores.dtype)
    missing = scores.shape[-1] - mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, missing), value=-math.inf) if missing > 0 else mask


def _visible_keys(scores: Tensor, first_query: Any, left_size: int, right_size: int) -> Tensor | None:
    """Return the mask of a sliding window of keys around each query (-1: no limit); None without limits."""
    if left_size < 0 and right_size < 0:
        return None
    row = torch.arange(scores.shape[-2], device=scores.device)[:, None]
    ahead = torch.arange(scores.shape[-1], device=scores.device)[None, :] - (row + first_query)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    for limit, distance in ((left_size, -ahead), (right_size, ahead)):
        if limit >= 0:
            visible = visible & (distance <= limit)
    return visible


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor | None = None,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
) -> Tensor:
    if x.dim() == 3 and not num_heads:
        raise Unsupported(_NO_HEADS)
    y = x.reshape(x.shape[0], x.shape[1], num_heads, -1) if x.dim() == 3 else x.transpose(1, 2)
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
    turned = rotary_embedding_dim or y.shape[-1]
    if interleaved:
        a, b = y[..., 0:turned:2], y[..., 1:turned:2]
    else:
        a, b = y[..., : turned // 2], y[..., turned // 2 : turned]
    parts = [cosines * a - sines * b, sines * a + cosines * b]
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    if turned < y.shape[-1]:
        rotated = torch.cat([rotated, y[..., turned:]], -1)
    return rotated.reshape(x.shape) if x.dim() == 3 else rotated.transpose(1, 2)
