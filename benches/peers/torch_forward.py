"""PyTorch, forward: scaled_dot_product_attention; as a layer nn.MultiheadAttention, or F.linear around the function."""

import torch
import torch.nn.functional as F

import cases
from cases import Unsupported
from worker import Call, sums_of


def masks_of(case):
    """(label, attn_mask, is_causal) for each form in which PyTorch can be told the mask."""
    keep, bias = cases.keep_mask(case), cases.bias_array(case)
    causal = bool(case.get("causal"))
    q_len, kv_len = cases.lengths(case)
    square = q_len == kv_len
    if keep is None and bias is None and (not causal or square):
        return [("is_causal" if causal else "no mask", None, causal)]
    if causal:
        rule = cases.causal_mask(case)
        keep = rule if keep is None else keep & rule
    dtype = torch.float32 if cases.dtype_of(case) is cases.np.float32 else torch.float64
    forms = []
    if bias is None:
        forms.append(("bool mask", torch.from_numpy(keep)[None, None], False))
    added = torch.zeros(1, 1, q_len, kv_len, dtype=dtype)
    if bias is not None:
        added = torch.from_numpy(bias)[None, None]
    if keep is not None:
        added = added.masked_fill(~torch.from_numpy(keep)[None, None], float("-inf"))
    forms.append(("additive mask", added, False))
    return forms


class Forward:
    """One way to compute the case. `leaves` are what training has gradients of: q, k, v and the bias, or x
    and the weights."""

    def __init__(self, label, run, leaves):
        self.label, self.run, self.leaves = label, run, leaves

    def call(self):
        return Call(self.label, self.run, lambda result: sums_of([result.numpy()]))


def attention(case):
    q, k, v = (torch.from_numpy(a) for a in cases.attention_inputs(case))
    grouped = case["heads"] != case["kv_heads"]
    dropout = case.get("dropout", 0.0)
    forwards = []
    for label, mask, causal in masks_of(case):
        def run(mask=mask, causal=causal):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout,
                                                  is_causal=causal, enable_gqa=grouped)
        leaves = [q, k, v]
        if case.get("bias_gradient"):
            if case.get("mask") or case.get("causal") or mask is None:
                raise Unsupported("the gradient of a bias: with a bias and without a mask")
            leaves.append(mask)
        forwards.append(Forward(f"sdpa, {label}", run, leaves))
    return forwards


def layer_weights(case):
    x, weights = cases.layer_inputs(case)
    # PyTorch stores [out, in].
    rows = {name: torch.from_numpy(w.T.copy()) for name, w in weights.items()}
    return torch.from_numpy(x), rows


def module(case):
    """nn.MultiheadAttention, in training mode for a pass that trains."""
    if case["heads"] != case["kv_heads"]:
        raise Unsupported("nn.MultiheadAttention has no grouped heads")
    x, rows = layer_weights(case)
    forwards = []
    # With biases present (zeros here) the module may take its fused path.
    for with_bias in (False, True):
        module = torch.nn.MultiheadAttention(case["d_model"], case["heads"], bias=with_bias,
                                             dropout=case.get("dropout", 0.0), batch_first=True, dtype=x.dtype)
        module.train(cases.pass_of(case) == "forward_backward")
        module.in_proj_weight.data = torch.cat([rows["w_q"], rows["w_k"], rows["w_v"]])
        module.out_proj.weight.data = rows["w_o"]
        if with_bias:
            torch.nn.init.zeros_(module.in_proj_bias)
            torch.nn.init.zeros_(module.out_proj.bias)
        for label, mask, causal in masks_of(case):
            if causal:
                mask = ~torch.from_numpy(cases.causal_mask(case))
            elif mask is not None:
                mask = ~mask[0, 0] if mask.dtype == torch.bool else mask[0, 0]

            def run(module=module, mask=mask, causal=causal):
                return module(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0]
            suffix = "zero biases" if with_bias else "no biases"
            forwards.append(Forward(f"nn.MultiheadAttention, {label}, {suffix}", run,
                                    [x, *module.parameters()]))
    return forwards


def functional(case):
    """The module's work by hand, with packed weights and grouped heads."""
    x, rows = layer_weights(case)
    heads, kv_heads = case["heads"], case["kv_heads"]
    head_dim, value_dim = cases.head_dims(case)
    w_in, w_o = torch.cat([rows["w_q"], rows["w_k"], rows["w_v"]]), rows["w_o"]
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim]

    def split(t, count):
        return t.unflatten(-1, (count, -1)).transpose(1, 2)

    forwards = []
    for label, mask, causal in masks_of(case):
        def run(mask=mask, causal=causal):
            q, k, v = F.linear(x, w_in).split(sizes, -1)
            out = F.scaled_dot_product_attention(
                split(q, heads), split(k, kv_heads), split(v, kv_heads), attn_mask=mask,
                dropout_p=case.get("dropout", 0.0), is_causal=causal, enable_gqa=heads != kv_heads)
            return F.linear(out.transpose(1, 2).flatten(2), w_o)
        forwards.append(Forward(f"F.linear and sdpa, {label}", run, [x, w_in, w_o]))
    return forwards
