"""ONNX Runtime, forward: the contrib operators MultiHeadAttention, GroupQueryAttention and Attention, and the
standard operator Attention, each as a graph of its own; projections are MatMul nodes.

The operators take [batch, len, heads * head_dim]; the inputs are laid out so before the clock starts.
"""

import numpy as np

import cases
from cases import Unsupported
from ort_graph import CONTRIB, MASKED, Graph, merged_heads, sums
from worker import Call


def added_mask(case):
    """Bias and mask as one additive array [1, 1, q_len, kv_len]; None if there is nothing to add."""
    keep, added = cases.keep_mask(case), cases.bias_array(case)
    if keep is not None:
        added = np.where(keep, np.float32(0) if added is None else added, np.float32(MASKED))
    return None if added is None else added[None, None].astype(np.float32)


def attend_mha(graph, case, q, k, v):
    """Contrib MultiHeadAttention; the causal rule is its attribute, top-left and bottom-right alike for square cases."""
    if case["heads"] != case["kv_heads"]:
        raise Unsupported("MultiHeadAttention has no grouped heads")
    causal = bool(case.get("causal"))
    inputs = [q, k, v, "", "", ""]
    length = cases.key_length(case)
    if length is not None and not case.get("bias"):
        kept = np.arange(cases.lengths(case)[1]) < length
        mask = np.broadcast_to(kept, (case["batch"], kept.size)).astype(np.int32)
        inputs[4] = graph.feed("key_padding_mask", mask)
    else:
        added = added_mask(case)
        if added is not None:
            inputs[5] = graph.feed("attention_bias", added)
    while inputs[-1] == "":
        inputs.pop()
    return graph.node("MultiHeadAttention", inputs, "context", CONTRIB, num_heads=case["heads"],
                      unidirectional=int(causal), mask_filter_value=MASKED)


def attend_gqa(graph, case, q, k, v):
    """Contrib GroupQueryAttention without a past."""
    q_len, kv_len = cases.lengths(case)
    if q_len != kv_len:
        raise Unsupported("GroupQueryAttention without a past wants as many keys as queries")
    inputs = [q, k, v, "", "",
              graph.feed("seqlens_k", np.full(case["batch"], kv_len - 1, np.int32)),
              graph.constant("total", np.array(kv_len, np.int32)), "", "", ""]
    added = added_mask(case)
    if added is not None:
        inputs.append(graph.feed("attention_bias", added))
    while inputs[-1] == "":
        inputs.pop()
    return graph.node("GroupQueryAttention", inputs, "context", CONTRIB, num_heads=case["heads"],
                      kv_num_heads=case["kv_heads"], causal=int(bool(case.get("causal"))))


def attend_standard(graph, case, q, k, v):
    """Attention of the standard operator set."""
    inputs = [q, k, v]
    added = added_mask(case)
    if added is not None:
        inputs.append(graph.feed("attn_mask", added[0, 0]))
    return graph.node("Attention", inputs, "context", q_num_heads=case["heads"],
                      kv_num_heads=case["kv_heads"], is_causal=int(bool(case.get("causal"))))


ATTEND = {"MultiHeadAttention": attend_mha, "GroupQueryAttention": attend_gqa,
          "Attention (standard)": attend_standard}


def attention_call(label, case, inputs):
    graph = Graph()
    names = [graph.feed(n, a) for n, a in zip("qkv", inputs)]
    out = ATTEND[label](graph, case, *names)
    q_len, _ = cases.lengths(case)
    _, value_dim = cases.head_dims(case)
    shape = (case["batch"], q_len, case["heads"] * value_dim)
    return Call(label, graph.session(out, shape, case["threads"]), sums)


def layer_call(label, case, x, weights):
    graph = Graph()
    names = [graph.node("MatMul", [graph.feed("x", x) if n == "q" else "x",
                                   graph.constant("w_" + n, weights["w_" + n])], n) for n in "qkv"]
    context = ATTEND[label](graph, case, *names)
    out = graph.node("MatMul", [context, graph.constant("w_o", weights["w_o"])], "out")
    return Call(f"MatMul and {label}", graph.session(out, x.shape, case["threads"]), sums)


def packed_layer_call(case, x, weights):
    """Contrib Attention, which owns the packed input projections; W_O is a MatMul."""
    if case["heads"] != case["kv_heads"] or case.get("mask") or case.get("bias"):
        raise Unsupported("contrib Attention for this case")
    graph = Graph()
    packed = np.concatenate([weights["w_q"], weights["w_k"], weights["w_v"]], 1)
    inputs = [graph.feed("x", x), graph.constant("w_in", packed),
              graph.constant("b_in", np.zeros(packed.shape[1], np.float32))]
    context = graph.node("Attention", inputs, "context", CONTRIB, num_heads=case["heads"],
                         unidirectional=int(bool(case.get("causal"))))
    out = graph.node("MatMul", [context, graph.constant("w_o", weights["w_o"])], "out")
    return Call("contrib Attention and MatMul", graph.session(out, x.shape, case["threads"]), sums)


def makers(case):
    """One function for each way to compute the case; each gives a call."""
    q_len, kv_len = cases.lengths(case)
    if case.get("causal") and q_len != kv_len:
        raise Unsupported("causal with different numbers of queries and keys")
    if case["op"] == "attention":
        arrays = [merged_heads(a) for a in cases.attention_inputs(case)]
        return [lambda label=label: attention_call(label, case, arrays) for label in ATTEND]
    x, weights = cases.layer_inputs(case)
    ways = [lambda label=label: layer_call(label, case, x, weights) for label in ATTEND]
    return [*ways, lambda: packed_layer_call(case, x, weights)]
