//! The rows that the instrument knows by itself.

/// The rows of the README's table: two threads, `f32` unless the row says otherwise.
pub(crate) const TABLE: &[(&str, &str)] = &[
    ("attention b1 h8 n2048 d64", r#""op":"attention","heads":8,"len":2048,"head_dim":64"#),
    ("attention b1 h8 n2048 d64 causal", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"causal":true"#),
    ("attention b1 h16 n4096 d128 causal", r#""op":"attention","heads":16,"len":4096,"head_dim":128,"causal":true"#),
    ("attention b1 h8 n512 d64", r#""op":"attention","heads":8,"len":512,"head_dim":64"#),
    ("attention b8 h12 n128 d64", r#""op":"attention","batch":8,"heads":12,"len":128,"head_dim":64"#),
    (
        "attention b1 h32 kv8 n2048 d128 causal",
        r#""op":"attention","heads":32,"kv_heads":8,"len":2048,"head_dim":128,"causal":true"#,
    ),
    ("attention b1 h8 n1024 d48", r#""op":"attention","heads":8,"len":1024,"head_dim":48"#),
    ("attention b1 h8 n1024 d80", r#""op":"attention","heads":8,"len":1024,"head_dim":80"#),
    ("attention b1 h8 n1024 d96", r#""op":"attention","heads":8,"len":1024,"head_dim":96"#),
    ("attention b1 h8 n1024 d100", r#""op":"attention","heads":8,"len":1024,"head_dim":100"#),
    ("attention b1 h8 n1024 d256", r#""op":"attention","heads":8,"len":1024,"head_dim":256"#),
    (
        "attention b1 h8 n2048 d64, half the keys",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"mask":{"kind":"lengths","fraction":0.5}"#,
    ),
    (
        "attention b1 h8 n2048 d64, half of the 128-blocks",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"mask":{"kind":"keep","density":0.5,"block":128}"#,
    ),
    ("attention b1 h8 n2048 d64, bias", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"bias":true"#),
    ("attention b1 h8 n1024 d64 f64", r#""op":"attention","heads":8,"len":1024,"head_dim":64,"dtype":"f64""#),
    ("layer b1 n512 d_model 512 h8", r#""op":"layer","len":512,"d_model":512,"heads":8"#),
    ("layer b8 n128 d_model 768 h12", r#""op":"layer","batch":8,"len":128,"d_model":768,"heads":12"#),
    ("layer b1 n2048 d_model 512 h8", r#""op":"layer","len":2048,"d_model":512,"heads":8"#),
    ("layer b1 n16 d_model 1024 h16", r#""op":"layer","len":16,"d_model":1024,"heads":16"#),
    ("layer b1 n1 d_model 1024 h16", r#""op":"layer","len":1,"d_model":1024,"heads":16"#),
    ("layer b1 n512 d_model 512 h8, prepacked", r#""op":"layer","len":512,"d_model":512,"heads":8,"prepacked":true"#),
    ("layer b1 n16 d_model 1024 h16, prepacked", r#""op":"layer","len":16,"d_model":1024,"heads":16,"prepacked":true"#),
    ("layer b1 n1 d_model 1024 h16, prepacked", r#""op":"layer","len":1,"d_model":1024,"heads":16,"prepacked":true"#),
    ("attention b1 h8 n2048 d64, level avx2", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"level":"avx2""#),
    (
        "attention b1 h8 n2048 d64, level portable",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"level":"portable""#,
    ),
];

/// One token, or a few, against a cache; the last two are an append and a whole prompt.
pub(crate) const DECODE: &[(&str, &str)] = &[
    ("decode h32 kv32 d128 kv_len 4096", r#""op":"attention","cache":"f32","heads":32,"kv_len":4096,"head_dim":128"#),
    (
        "decode h32 kv8 d128 kv_len 32768",
        r#""op":"attention","cache":"f32","heads":32,"kv_heads":8,"kv_len":32768,"head_dim":128"#,
    ),
    (
        "decode h32 kv1 d128 kv_len 32768",
        r#""op":"attention","cache":"f32","heads":32,"kv_heads":1,"kv_len":32768,"head_dim":128"#,
    ),
    (
        "decode h32 kv8 d128 kv_len 32768, bf16 cache",
        r#""op":"attention","cache":"bf16","heads":32,"kv_heads":8,"kv_len":32768,"head_dim":128"#,
    ),
    (
        "decode h32 kv8 d128 kv_len 32768, f16 cache",
        r#""op":"attention","cache":"f16","heads":32,"kv_heads":8,"kv_len":32768,"head_dim":128"#,
    ),
    (
        "decode b8 h32 kv8 d128, 100 to 8000 keys",
        r#""op":"attention","cache":"f32","batch":8,"heads":32,"kv_heads":8,"head_dim":128,
           "kv_lens":[100,1229,2357,3486,4614,5743,6871,8000]"#,
    ),
    ("decode h8 kv8 d64 kv_len 512", r#""op":"attention","cache":"f32","heads":8,"kv_len":512,"head_dim":64"#),
    (
        "decode 8 queries h32 kv8 d128 kv_len 8192",
        r#""op":"attention","cache":"f32","heads":32,"kv_heads":8,"q_len":8,"kv_len":8192,"head_dim":128,"causal":true"#,
    ),
    ("append one token kv8 d128", r#""op":"append","cache":"f32","heads":8,"kv_len":1024,"head_dim":128"#),
    ("append one token kv8 d128, bf16 cache", r#""op":"append","cache":"bf16","heads":8,"kv_len":1024,"head_dim":128"#),
    (
        "prefill 2048 h32 kv8 d128",
        r#""op":"attention","pass":"prefill","cache":"f32","heads":32,"kv_heads":8,"q_len":2048,"kv_len":2048,
           "head_dim":128,"causal":true"#,
    ),
];
