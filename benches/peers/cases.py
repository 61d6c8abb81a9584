"""The cases: inputs from a fixed generator, masks, visible pairs and FLOP counts.

Element i (row-major) of an array with seed s is drawn by a splitmix64 step on
(i + 1) * GOLDEN + s; its top 24 bits give a value with mean 0 and variance 1.
Every system under test repeats this generator, so that checksums can be compared.
"""

import math

import numpy as np

SEEDS = {"q": 1, "k": 2, "v": 3, "x": 4, "d_out": 5, "bias": 6, "keep": 9,
         "w_q": 11, "w_k": 12, "w_v": 13, "w_o": 14}

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
CHUNK = 1 << 22

COMMON_KEYS = {"op", "pass", "batch", "heads", "kv_heads", "causal", "dtype",
               "threads", "rounds", "mask", "bias", "dropout"}
ATTENTION_KEYS = COMMON_KEYS | {"q_len", "kv_len", "head_dim", "value_dim", "bias_gradient",
                                "cache", "kv_lens"}
LAYER_KEYS = COMMON_KEYS | {"len", "d_model"}

# Work of forward and backward over that of forward, for attention and for projections: backward computes
# the scores again and has four products more, and a projection has two more.
BACKWARD = (3.5, 3.0)


class Unsupported(Exception):
    """The system has no call for this case; the table shows a dash."""


def top_bits(index, seed):
    """The top 24 bits of the generator's state for each index, as integers."""
    z = (index.astype(np.uint64) + np.uint64(1)) * GOLDEN + np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= MIX_1
    z ^= z >> np.uint64(27)
    z *= MIX_2
    z ^= z >> np.uint64(31)
    return z >> np.uint64(40)


def array(name, shape, dtype, factor=1.0):
    """The input `name`, filled row-major; `factor` scales weights."""
    count = math.prod(shape)
    out = np.empty(count, dtype)
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        unit = top_bits(np.arange(start, stop), SEEDS[name]) / float(1 << 24)
        out[start:stop] = (unit - 0.5) * math.sqrt(12.0) * factor
    return out.reshape(shape)


def dtype_of(case):
    name = case.get("dtype", "f32")
    if name not in ("f32", "f64"):
        raise Unsupported(f"dtype {name}")
    return np.float32 if name == "f32" else np.float64


def check_keys(case):
    """An unknown key is an error: a case must never be run as another one."""
    known = {"attention": ATTENTION_KEYS, "layer": LAYER_KEYS}.get(case.get("op"))
    if known is None:
        raise Unsupported(f"op {case.get('op')}")
    unknown = sorted(set(case) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]}")
    if pass_of(case) not in ("forward", "forward_backward", "decode"):
        raise Unsupported(f"pass {case['pass']}")
    if pass_of(case) != "forward_backward" and (case.get("dropout") or case.get("bias_gradient")):
        raise ValueError("dropout and bias_gradient: only in a pass of forward_backward")
    if pass_of(case) != "decode" and (case.get("cache") or case.get("kv_lens")):
        raise ValueError("cache and kv_lens: only in a pass of decode")


def pass_of(case):
    return case.get("pass", "forward")


def lengths(case):
    """(q_len, kv_len) of an attention case or of a layer's self-attention."""
    if case["op"] == "layer":
        return case["len"], case["len"]
    return case["q_len"], max(entry_lengths(case))


def entry_lengths(case):
    """The keys of each batch entry, the new queries' own among them."""
    return case.get("kv_lens") or [case["kv_len"]] * case["batch"]


def head_dims(case):
    """(head_dim, value_dim)."""
    if case["op"] == "layer":
        size = case["d_model"] // case["heads"]
        return size, size
    return case["head_dim"], case.get("value_dim", case["head_dim"])


def attention_inputs(case):
    """q, k, v as [batch, heads or kv_heads, len, head_dim or value_dim]."""
    dtype = dtype_of(case)
    q_len, kv_len = lengths(case)
    head_dim, value_dim = head_dims(case)
    batch, heads, kv_heads = case["batch"], case["heads"], case["kv_heads"]
    return (array("q", (batch, heads, q_len, head_dim), dtype),
            array("k", (batch, kv_heads, kv_len, head_dim), dtype),
            array("v", (batch, kv_heads, kv_len, value_dim), dtype))


def layer_inputs(case):
    """x [batch, len, d_model] and the four weights, each [in, out]."""
    dtype = dtype_of(case)
    d_model = case["d_model"]
    head_dim, value_dim = head_dims(case)
    factor = d_model ** -0.5
    shapes = {"w_q": (d_model, case["heads"] * head_dim),
              "w_k": (d_model, case["kv_heads"] * head_dim),
              "w_v": (d_model, case["kv_heads"] * value_dim),
              "w_o": (case["heads"] * value_dim, d_model)}
    weights = {name: array(name, shape, dtype, factor) for name, shape in shapes.items()}
    return array("x", (case["batch"], case["len"], d_model), dtype), weights


def key_length(case):
    """The number of valid keys if the mask is one of lengths, else None."""
    mask = case.get("mask")
    if mask is None or mask["kind"] != "lengths":
        return None
    return int(lengths(case)[1] * mask["fraction"])


def keep_mask(case):
    """The mask as booleans [q_len, kv_len], true where a key may be seen; None without a mask.

    The causal rule is not in it.
    """
    mask = case.get("mask")
    if mask is None:
        return None
    q_len, kv_len = lengths(case)
    if mask["kind"] == "lengths":
        row = np.arange(kv_len) < key_length(case)
        return np.broadcast_to(row, (q_len, kv_len)).copy()
    if mask["kind"] == "keep":
        block = mask["block"]
        rows = np.arange(-(-q_len // block))
        cols = np.arange(-(-kv_len // block))
        bits = top_bits(rows[:, None] * 65536 + cols[None, :], SEEDS["keep"])
        if mask["density"] != 0.5:
            raise ValueError("mask density: the generator's sign gives 0.5 and nothing else")
        kept = bits >= 1 << 23
        return kept.repeat(block, 0).repeat(block, 1)[:q_len, :kv_len].copy()
    raise Unsupported(f"mask {mask['kind']}")


def causal_mask(case):
    """The bottom-right causal rule as booleans [q_len, kv_len]."""
    q_len, kv_len = lengths(case)
    return np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)


def bias_array(case):
    """The additive bias [q_len, kv_len], the same for every head and batch entry; None without."""
    if not case.get("bias"):
        return None
    q_len, kv_len = lengths(case)
    return array("bias", (q_len, kv_len), dtype_of(case))


def visible_pairs(case):
    """The (query, key) pairs of one head that take part, over all batch entries."""
    q_len, kv_len = lengths(case)
    if case.get("kv_lens"):
        causal = bool(case.get("causal"))
        return sum(int(np.tri(q_len, n, n - q_len).sum()) if causal else q_len * n
                   for n in entry_lengths(case))
    keep = keep_mask(case)
    if case.get("causal"):
        causal = causal_mask(case)
        pairs = int((causal if keep is None else causal & keep).sum())
    else:
        pairs = q_len * kv_len if keep is None else int(keep.sum())
    return pairs * case["batch"]


def flop(case):
    """Useful FLOPs: masked pairs and the upper triangle of a causal case count nothing."""
    head_dim, value_dim = head_dims(case)
    of_attention, of_projections = BACKWARD if pass_of(case) == "forward_backward" else (1, 1)
    total = of_attention * 2 * case["heads"] * visible_pairs(case) * (head_dim + value_dim)
    if case["op"] == "layer":
        d_model = case["d_model"]
        width = (case["heads"] + case["kv_heads"]) * (head_dim + value_dim)
        total += of_projections * 2 * case["batch"] * case["len"] * d_model * width
    return total
