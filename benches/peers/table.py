"""The rows that are compared, each with the figures it has to reach.

`need` holds: "fraction" of the FMA peak, the ratio peer time / our time against "torch", "ort" and "rust"
(the fastest of the Rust crates), and "of_unmasked", our time over our time for the case `versus`.
A row with `ours_only` has no peers: they cannot be held to an instruction set.
"""

SYSTEMS = ("torch", "torch-fn", "ort", "candle", "burn", "rten", "tract")

# Which systems a required ratio is against. `torch-fn` is shown beside and required of nobody.
FAMILIES = {"torch": ("torch",), "ort": ("ort",), "rust": ("candle", "burn", "rten", "tract")}

# Keys that only our instrument understands.
OUR_KEYS = ("level", "path", "query_tile")


def attention(heads, n, head_dim, batch=1, kv_heads=None, causal=False, dtype="f32", **more):
    return {"op": "attention", "batch": batch, "heads": heads, "kv_heads": kv_heads or heads,
            "q_len": n, "kv_len": n, "head_dim": head_dim, "value_dim": head_dim,
            "causal": causal, "dtype": dtype, "threads": 2, **more}


def layer(n, d_model, heads, batch=1, causal=False, dtype="f32", **more):
    return {"op": "layer", "batch": batch, "len": n, "d_model": d_model, "heads": heads,
            "kv_heads": heads, "causal": causal, "dtype": dtype, "threads": 2, **more}


def row(name, case, ours_only=False, versus=None, **need):
    return {"name": name, "case": case, "need": need, "ours_only": ours_only, "versus": versus}


def forward():
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
                 versus=plain, torch=1.5, of_unmasked=0.65) for label, mask in masks.items()]
    rows += [
        row("attention b1 h8 n2048 d64, additive bias", attention(8, 2048, 64, bias=True),
            fraction=0.60, torch=1.2),
        row("attention b1 h8 n1024 d64 f64", attention(8, 1024, 64, dtype="f64"), fraction=0.60, torch=1.3),
        row("layer b1 n512 d_model 512 h8", layer(512, 512, 8), fraction=0.70, torch=1.15, rust=5),
        row("layer b8 n128 d_model 768 h12", layer(128, 768, 12, batch=8), fraction=0.70, torch=1.1, rust=5),
        row("layer b1 n2048 d_model 512 h8", layer(2048, 512, 8), fraction=0.72, torch=2.0, rust=8),
        row("layer b1 n16 d_model 1024 h16", layer(16, 1024, 16), torch=1.5, rust=3),
        row("layer b1 n1 d_model 1024 h16", layer(1, 1024, 16), torch=1.5, rust=3),
        row("attention b1 h8 n2048 d64, level avx2", attention(8, 2048, 64, level="avx2"),
            ours_only=True, fraction=0.70),
    ]
    return rows


TABLES = {"forward": forward}
