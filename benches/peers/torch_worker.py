"""PyTorch: scaled_dot_product_attention for attention, nn.MultiheadAttention for a layer.

With `--functional` a layer is F.linear, scaled_dot_product_attention and F.linear instead of the module.
"""

import sys

import torch
import torch.nn.functional as F

import cases
from cases import Unsupported
from worker import Call, Server, sums_of


def sums(result):
    return sums_of([result.numpy()])


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


def attention_calls(case):
    q, k, v = (torch.from_numpy(a) for a in cases.attention_inputs(case))
    grouped = case["heads"] != case["kv_heads"]
    calls = []
    for label, mask, causal in masks_of(case):
        def run(k=k, v=v, mask=mask, causal=causal):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal,
                                                  enable_gqa=grouped)
        calls.append(Call(f"sdpa, {label}", run, sums))
    return calls


def layer_weights(case):
    x, weights = cases.layer_inputs(case)
    # PyTorch stores [out, in].
    rows = {name: torch.from_numpy(w.T.copy()) for name, w in weights.items()}
    return torch.from_numpy(x), rows


def module_calls(case):
    if case["heads"] != case["kv_heads"]:
        raise Unsupported("nn.MultiheadAttention has no grouped heads")
    x, rows = layer_weights(case)
    calls = []
    # With biases present (zeros here) the module may take its fused path.
    for with_bias in (False, True):
        module = torch.nn.MultiheadAttention(case["d_model"], case["heads"], bias=with_bias,
                                             batch_first=True, dtype=x.dtype).eval()
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
            calls.append(Call(f"nn.MultiheadAttention, {label}, {suffix}", run, sums))
    return calls


def functional_calls(case):
    x, rows = layer_weights(case)
    heads, kv_heads = case["heads"], case["kv_heads"]
    head_dim, value_dim = cases.head_dims(case)
    w_in = torch.cat([rows["w_q"], rows["w_k"], rows["w_v"]])
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim]

    def split(t, count):
        return t.unflatten(-1, (count, -1)).transpose(1, 2)

    calls = []
    for label, mask, causal in masks_of(case):
        def run(mask=mask, causal=causal):
            q, k, v = F.linear(x, w_in).split(sizes, -1)
            out = F.scaled_dot_product_attention(
                split(q, heads), split(k, kv_heads), split(v, kv_heads), attn_mask=mask,
                is_causal=causal, enable_gqa=heads != kv_heads)
            return F.linear(out.transpose(1, 2).flatten(2), rows["w_o"])
        calls.append(Call(f"F.linear and sdpa, {label}", run, sums))
    return calls


def main():
    functional = "--functional" in sys.argv[1:]
    layer_calls = functional_calls if functional else module_calls

    def prepare(case):
        torch.set_num_threads(case["threads"])
        if case["op"] == "attention":
            if functional:
                raise Unsupported("this worker is for layers")
            return attention_calls(case)
        return layer_calls(case)

    torch.set_num_interop_threads(1)
    about = {"version": f"PyTorch {torch.__version__}",
             "detail": f"{torch.backends.cpu.get_cpu_capability()}, "
                       f"MKL {'on' if torch.backends.mkl.is_available() else 'off'}"}
    with torch.inference_mode():
        Server("torch-fn" if functional else "torch", about, prepare).serve()


if __name__ == "__main__":
    main()
