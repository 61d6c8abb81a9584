"""PyTorch over a cache: views of preallocated arrays [batch, kv_heads, capacity, head_dim], in the cache's type.

`grouped` leaves the group to PyTorch, by `enable_gqa`; `folded` makes the heads of a group rows of one head by hand,
so that keys and values are read once: a trick of the caller's, shown beside. The cache is filled beforehand.
Entries of unlike lengths are told apart by a mask, or taken one by one.
"""

import numpy as np
import torch
import torch.nn.functional as F

import cases
from cases import Unsupported
from worker import Call, sums_of

TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}

# Free slots of the arrays, so that what is read is a view, as it is while tokens are generated.
ROOM = 64


def cached(array, dtype):
    """[batch, kv_heads, len, size] as a view of an array with more slots."""
    batch, heads, count, size = array.shape
    slots = torch.zeros(batch, heads, count + ROOM, size, dtype=dtype)
    slots[:, :, :count] = torch.from_numpy(array)
    return slots[:, :, :count]


def kept_pairs(case):
    """[batch or 1, 1, q_len, kv_len], true where a query may see a key; None if it sees all."""
    (q_len, longest), lengths = cases.lengths(case), cases.entry_lengths(case)
    causal = bool(case.get("causal")) and q_len > 1
    if not causal and len(set(lengths)) == 1:
        return None
    rule = (lambda n: np.tri(q_len, longest, n - q_len, dtype=bool)) if causal else (
        lambda n: np.broadcast_to(np.arange(longest) < n, (q_len, longest)))
    return torch.from_numpy(np.stack([rule(n) for n in lengths])[:, None])


def masks(case):
    """(label, mask) for each form in which PyTorch can be told the mask."""
    kept = kept_pairs(case)
    if kept is None:
        return [("no mask", None)]
    added = torch.zeros(kept.shape, dtype=TYPES[case.get("cache") or case["dtype"]])
    return [("bool mask", kept), ("additive mask", added.masked_fill(~kept, float("-inf")))]


def sums(result):
    return sums_of([result.to(torch.float64).numpy()])


def calls(case, folded):
    if case.get("mask") or case.get("bias"):
        raise Unsupported("decoding with a mask or bias of the caller's")
    dtype = TYPES[case.get("cache") or case["dtype"]]
    q, k, v = cases.attention_inputs(case)
    q, k, v = torch.from_numpy(q).to(dtype), cached(k, dtype), cached(v, dtype)
    found = [attend(case, q, k, v, label, mask, folded) for label, mask in masks(case)]
    if len(set(cases.entry_lengths(case))) > 1 and case["q_len"] == 1:
        found.append(one_by_one(case, q, k, v, folded))
    return found


def attend(case, q, k, v, label, mask, folded):
    (q_len, _), group = cases.lengths(case), case["heads"] // case["kv_heads"]
    if not folded or group == 1:
        def run():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=group > 1)
        return Call(f"sdpa over views of the cache, {label}", run, sums)
    rows = (q.shape[0], case["kv_heads"], group * q_len, q.shape[3])
    mask = None if mask is None else mask.repeat(1, 1, group, 1)

    def run():
        out = F.scaled_dot_product_attention(q.reshape(rows), k, v, attn_mask=mask)
        return out.reshape(*q.shape[:3], -1)
    return Call(f"sdpa with the group folded into the queries, {label}", run, sums)


def one_by_one(case, q, k, v, folded):
    alone = [attend({**case, "batch": 1}, q[i:i + 1], k[i:i + 1, :, :n], v[i:i + 1, :, :n], "", None, folded)
             for i, n in enumerate(cases.entry_lengths(case))]

    def run():
        return torch.cat([call.run() for call in alone])
    return Call(("folded " if folded else "") + "sdpa, entry by entry", run, sums)
