"""ONNX Runtime over a cache. What is timed:

- contrib GroupQueryAttention with past and present in one buffer, as its generators use it: the operator writes the
  new tokens' keys and values into the buffer (the same ones in each run) and attends;
- contrib MultiHeadAttention and the standard Attention with the cache as their keys and values
  [batch, kv_heads, kv_len, head_dim]: attention alone;
- contrib MultiHeadAttention with a past: it copies past and new tokens to a present, and attends.
"""

import numpy as np

import cases
from cases import Unsupported
from ort_graph import CONTRIB, MASKED, Graph, merged_heads, sums
from worker import Call


def makers(case):
    """One function for each way to compute the case; each gives a call."""
    if case.get("mask") or case.get("bias"):
        raise Unsupported("decoding with a mask or bias of the caller's")
    q, k, v = cases.attention_inputs(case)
    return [lambda way=way: way(case, q, k, v) for way in (shared_buffer, cross_attention, standard, with_past)]


def new_tokens(case, array):
    """The keys or values of the queries' own tokens, [batch, q_len, kv_heads * size]."""
    count, lengths = case["q_len"], cases.entry_lengths(case)
    return merged_heads(np.stack([a[:, n - count:n] for a, n in zip(array, lengths)]))


def shape_of(case):
    return case["batch"], case["q_len"], case["heads"] * cases.head_dims(case)[1]


def is_causal(case):
    return bool(case.get("causal")) and case["q_len"] > 1


def padding(case):
    """One flag for each key [batch, kv_len], true where it is valid; None where all are."""
    lengths = np.array(cases.entry_lengths(case))
    longest = lengths.max()
    return None if (lengths == longest).all() else np.arange(longest) < lengths[:, None]


def shared_buffer(case, q, k, v):
    lengths = np.array(cases.entry_lengths(case), np.int32)
    graph = Graph()
    inputs = [graph.feed("q", merged_heads(q)), graph.feed("k", new_tokens(case, k)),
              graph.feed("v", new_tokens(case, v)), graph.feed("past_k", k), graph.feed("past_v", v),
              graph.feed("seqlens_k", lengths - 1), graph.constant("total", np.array(lengths.max(), np.int32))]
    out = graph.node("GroupQueryAttention", inputs, "context", CONTRIB, more=("present_k", "present_v"),
                     num_heads=case["heads"], kv_num_heads=case["kv_heads"])
    run = graph.session(out, shape_of(case), case["threads"],
                        shared={"present_k": "past_k", "present_v": "past_v"})
    return Call("GroupQueryAttention, past and present in one buffer, append included", run, sums)


def cross_attention(case, q, k, v):
    if case["heads"] != case["kv_heads"] or is_causal(case):
        raise Unsupported("MultiHeadAttention over a cache: equal heads, not causal")
    graph = Graph()
    inputs = [graph.feed("q", merged_heads(q)), graph.feed("k", k), graph.feed("v", v)]
    valid = padding(case)
    if valid is not None:
        inputs += ["", graph.feed("key_padding_mask", valid.astype(np.int32))]
    out = graph.node("MultiHeadAttention", inputs, "context", CONTRIB, num_heads=case["heads"],
                     mask_filter_value=MASKED)
    return Call("MultiHeadAttention over the cache", graph.session(out, shape_of(case), case["threads"]), sums)


def standard(case, q, k, v):
    if is_causal(case):
        raise Unsupported("Attention over a cache: its causal rule counts from the first key")
    graph = Graph()
    inputs = [graph.feed("q", q), graph.feed("k", k), graph.feed("v", v)]
    valid = padding(case)
    if valid is not None:
        added = np.where(valid, np.float32(0), np.float32(MASKED))
        inputs.append(graph.feed("attn_mask", added[:, None, None].astype(np.float32)))
    out = graph.node("Attention", inputs, "context")
    shape = (*q.shape[:3], v.shape[3])
    return Call("Attention (standard) over the cache", graph.session(out, shape, case["threads"]), sums)


def with_past(case, q, k, v):
    if case["heads"] != case["kv_heads"] or padding(case) is not None:
        raise Unsupported("MultiHeadAttention with a past: equal heads and lengths")
    graph, past = Graph(), k.shape[2] - case["q_len"]
    inputs = [graph.feed("q", merged_heads(q)), graph.feed("k", new_tokens(case, k)),
              graph.feed("v", new_tokens(case, v)), "", "", "",
              graph.feed("past_k", k[:, :, :past]), graph.feed("past_v", v[:, :, :past])]
    out = graph.node("MultiHeadAttention", inputs, "context", CONTRIB, more=("present_k", "present_v"),
                     num_heads=case["heads"], unidirectional=int(is_causal(case)))
    run = graph.session(out, shape_of(case), case["threads"],
                        dropped={"present_k": k.shape, "present_v": v.shape})
    return Call("MultiHeadAttention with a past, copied to a present", run, sums)
