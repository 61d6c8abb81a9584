"""The rows that are compared, table by table, each with the figures it has to reach.

`need` holds: "fraction" of the FMA peak or "roofline", the fraction of the roofline; the ratio peer time / our
time against "torch", "ort", "candle" and "rust" (the fastest of the Rust crates); "of_versus", our time over our
time for the case that `versus` names; "ms" and "mib", our time and memory.
A row with `ours_only` has no peers. A row with a `command` is an example of ours that prints its memory.
"""

from dataclasses import dataclass

SYSTEMS = ("torch", "torch-fn", "ort", "candle", "burn", "rten", "tract")

# Which systems a required ratio is against. `torch-fn` is shown beside and required of nobody.
FAMILIES = {"torch": ("torch",), "ort": ("ort",), "candle": ("candle",),
            "rust": ("candle", "burn", "rten", "tract")}

# Keys that only our instrument understands.
OUR_KEYS = ("level", "path", "query_tile", "prepacked")

# Checksums may differ by this share of the sum of magnitudes. A peer that computes in 16 bits rounds queries,
# probabilities and results to 8 bits of fraction, each by up to 0.4 %, where we keep 24.
TOLERANCE = 1e-4
TOLERANCE_BF16 = 1e-2


@dataclass(frozen=True)
class Table:
    title: str
    rows: list
    systems: tuple
    # The column of our rate and the one of our fraction: see `report.py`.
    columns: tuple


def attention(heads, n, head_dim, batch=1, kv_heads=None, causal=False, dtype="f32", **more):
    return {"op": "attention", "batch": batch, "heads": heads, "kv_heads": kv_heads or heads,
            "q_len": n, "kv_len": n, "head_dim": head_dim, "value_dim": head_dim,
            "causal": causal, "dtype": dtype, "threads": 2, **more}


def layer(n, d_model, heads, batch=1, causal=False, dtype="f32", **more):
    return {"op": "layer", "batch": batch, "len": n, "d_model": d_model, "heads": heads,
            "kv_heads": heads, "causal": causal, "dtype": dtype, "threads": 2, **more}


def decode(heads, kv_heads, head_dim, kv_len, q_len=1, batch=1, cache="f32", **more):
    """`q_len` new queries against a cache, their own keys among its `kv_len`."""
    return attention(heads, q_len, head_dim, batch, kv_heads, causal=q_len > 1,
                     **{"pass": "decode", "cache": cache, "kv_len": kv_len, **more})


def row(name, case, ours_only=False, versus=None, tolerance=TOLERANCE, **need):
    """`versus` is a pair: what our time is compared with, and its case. Without a tolerance sums are not compared."""
    return {"name": name, "case": case, "need": need, "ours_only": ours_only, "versus": versus,
            "tolerance": tolerance}


def forward_rows():
    plain = attention(8, 2048, 64)
    rows = [
        row("attention b1 h8 n2048 d64", plain, fraction=0.80, torch=1.5, ort=1.5, rust=8),
        row("attention b1 h8 n2048 d64 causal", attention(8, 2048, 64, causal=True),
            fraction=0.72, torch=2.0, ort=4, rust=8),
        row("attention b1 h16 n4096 d128 causal", attention(16, 4096, 128, causal=True),
            fraction=0.75, torch=1.5, ort=4, rust=8),
        row("attention b1 h8 n512 d64", attention(8, 512, 64), fraction=0.75, torch=1.4, ort=1.2, rust=8),
        row("attention b8 h12 n128 d64", attention(12, 128, 64, batch=8),
            fraction=0.65, torch=1.5, ort=1.2, rust=5),
        row("attention b1 h32 kv8 n2048 d128 causal", attention(32, 2048, 128, kv_heads=8, causal=True),
            fraction=0.72, torch=1.5, ort=4, rust=8),
    ]
    rows += [row(f"attention b1 h8 n1024 d{d}", attention(8, 1024, d), fraction=0.60, torch=1.2)
             for d in (48, 80, 96, 100, 256)]
    masks = {"key lengths half": {"kind": "lengths", "fraction": 0.5},
             "mask of 128-blocks, half": {"kind": "keep", "density": 0.5, "block": 128}}
    rows += [row(f"attention b1 h8 n2048 d64, {label}", attention(8, 2048, 64, mask=mask),
                 versus=("unmasked", plain), torch=1.5, of_versus=0.65) for label, mask in masks.items()]
    rows += [
        row("attention b1 h8 n2048 d64, additive bias", attention(8, 2048, 64, bias=True),
            fraction=0.60, torch=1.2),
        row("attention b1 h8 n1024 d64 f64", attention(8, 1024, 64, dtype="f64"), fraction=0.60, torch=1.3),
        row("layer b1 n512 d_model 512 h8", layer(512, 512, 8), fraction=0.70, torch=1.15, rust=5),
        row("layer b8 n128 d_model 768 h12", layer(128, 768, 12, batch=8), fraction=0.70, torch=1.1, rust=5),
        row("layer b1 n2048 d_model 512 h8", layer(2048, 512, 8), fraction=0.72, torch=2.0, rust=8),
        row("layer b1 n16 d_model 1024 h16", layer(16, 1024, 16), torch=1.5, rust=3),
        row("layer b1 n1 d_model 1024 h16", layer(1, 1024, 16), torch=1.5, rust=3),
        row("layer b1 n512 d_model 512 h8, prepacked", layer(512, 512, 8, prepacked=True),
            fraction=0.70, torch=1.15, rust=5),
        row("layer b1 n16 d_model 1024 h16, prepacked", layer(16, 1024, 16, prepacked=True), torch=1.5, rust=3),
        row("layer b1 n1 d_model 1024 h16, prepacked", layer(1, 1024, 16, prepacked=True), torch=1.5, rust=3),
        row("attention b1 h8 n2048 d64, level avx2", attention(8, 2048, 64, level="avx2"),
            ours_only=True, fraction=0.70),
    ]
    return rows


def backward_rows():
    def training(*shape, **more):
        return attention(*shape, **{"pass": "forward_backward", **more})

    def layer_training(*shape):
        return layer(*shape, **{"pass": "forward_backward"})

    plain = training(8, 1024, 64)
    return [
        row("training b1 h8 n1024 d64", plain, fraction=0.68, torch=1.5),
        row("training b1 h8 n1024 d64 causal", training(8, 1024, 64, causal=True), fraction=0.60, torch=2.0),
        row("training b1 h16 n1024 d128 causal", training(16, 1024, 128, causal=True), fraction=0.62, torch=1.8),
        row("training b1 h1 n4096 d64", training(1, 4096, 64), fraction=0.60, torch=2.5),
        row("training b1 h32 kv8 n1024 d128 causal", training(32, 1024, 128, kv_heads=8, causal=True),
            fraction=0.60, torch=1.5),
        # Every system drops pairs of its own.
        row("training b1 h8 n1024 d64, dropout 0.1", training(8, 1024, 64, dropout=0.1),
            versus=("no dropout", plain), tolerance=None, of_versus=1.35, torch=3),
        row("training b1 h8 n1024 d64, learned bias", training(8, 1024, 64, bias=True, bias_gradient=True), torch=2),
        row("training layer b1 n512 d_model 512 h8", layer_training(512, 512, 8), fraction=0.62, torch=1.2),
        row("training layer b1 n2048 d_model 512 h8", layer_training(2048, 512, 8), fraction=0.62, torch=1.5),
        {"name": "training b1 h8 n16384 d64, memory beyond inputs, outputs and gradients", "case": None,
         "command": ["long_context", "16384", "backward", "full"], "need": {"mib": 96}},
    ]


def decode_rows():
    long = decode(32, 8, 128, 32768)
    prompt = attention(32, 2048, 128, kv_heads=8, causal=True)
    ragged = [100, 1229, 2357, 3486, 4614, 5743, 6871, 8000]
    return [
        row("decode h32 kv32 d128 kv_len 4096", decode(32, 32, 128, 4096),
            roofline=0.85, torch=1.2, ort=1.5, candle=3),
        row("decode h32 kv8 d128 kv_len 32768", long, roofline=0.85, torch=3, ort=6, candle=10),
        row("decode h32 kv1 d128 kv_len 32768", decode(32, 1, 128, 32768), roofline=0.60, torch=8, ort=10, candle=15),
        row("decode h32 kv8 d128 kv_len 32768, bf16 cache", decode(32, 8, 128, 32768, cache="bf16"),
            versus=("the f32 cache", long), tolerance=TOLERANCE_BF16, roofline=0.70, of_versus=0.65, torch=4),
        row("decode b8 h32 kv8 d128, 100 to 8000 keys", decode(32, 8, 128, max(ragged), batch=8, kv_lens=ragged),
            roofline=0.70, torch=3),
        row("decode h8 kv8 d64 kv_len 512", decode(8, 8, 64, 512), torch=2, ort=2, candle=3),
        row("decode 8 queries h32 kv8 d128 kv_len 8192", decode(32, 8, 128, 8192, q_len=8), roofline=0.55, torch=2),
        row("append of one token kv8 d128",
            {"op": "append", "cache": "f32", "batch": 1, "heads": 8, "kv_len": 1024, "head_dim": 128,
             "value_dim": 128, "threads": 2}, ours_only=True, ms=0.005),
        row("prefill 2048 h32 kv8 d128", {**prompt, "pass": "prefill", "cache": "f32"}, ours_only=True,
            versus=("the plain forward", prompt), of_versus=1.05),
    ]


TABLES = {
    "forward": Table("Forward", forward_rows(), SYSTEMS, ("gflops", "fraction")),
    "backward": Table("Forward and backward", backward_rows(), ("torch", "torch-fn"), ("gflops", "fraction")),
    "decode": Table("Over a cache", decode_rows(), ("torch", "torch-fn", "ort", "candle"), ("gbs", "roofline")),
}
