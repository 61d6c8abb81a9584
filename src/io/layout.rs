//! Where the tensors of an attention layer are in a checkpoint, family by family: the table stands in [`crate::io`].

use crate::position::RopeStyle;

/// How a fused tensor is cut along its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fusion {
    /// All queries, then all keys, then all values.
    Blocks,
    /// For each KV head the queries that read it, its key, its value. With one KV head that is the same as blocks, and
    /// with as many as there are query heads the query, key and value of each head stand together.
    Groups,
}

/// The order of the axes of a matrix in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StoredAxes {
    /// One row for each output, as PyTorch's `nn.Linear` has it.
    #[default]
    OutIn,
    /// One row for each input, as this crate and GPT-2's `Conv1D` have it.
    InOut,
}

/// Tensors of queries, keys and values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Parts {
    Separate([String; 3]),
    Fused(String, Fusion),
}

/// Which tensors of a checkpoint make an attention layer, and how they lie in them.
///
/// [`Builder::load`](crate::Builder::load) reads them and [`Layout::save`] writes them. Sizes and rules are the builder's:
/// a layout knows no numbers. `prefix` is what stands before the names, without the dot at its end; it may be empty. The
/// constructors are what the families' own files look like; [`Layout::separate`] and [`Layout::fused`] describe any other.
///
/// ```
/// use multihead::{io::{Layout, TensorMap, Tensors}, MultiHeadAttention, Rope, RopeStyle};
/// // A layer of LLaMA's shape, as a file has it. Of positions a file says nothing: without RoPE it would load, and be wrong.
/// let rope = Rope::new(RopeStyle::HalfSplit, 500_000.0);
/// let builder = MultiHeadAttention::<f32>::builder(32, 4).num_kv_heads(2).rope(rope);
/// let layout = Layout::llama("model.layers.0.self_attn");
/// let mut tensors = TensorMap::new();
/// layout.save(&builder.clone().seed(1).build()?, &mut tensors)?;
/// let bytes = tensors.to_bytes();
///
/// let tensors = Tensors::from_bytes(&bytes)?;
/// assert_eq!(tensors.shape("model.layers.0.self_attn.k_proj.weight"), Some(&[2 * 8, 32][..]));
/// let mha = builder.clone().load(&tensors, &layout)?;
/// assert_eq!(mha, builder.seed(1).build()?);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a layout says where tensors are and does nothing by itself"]
pub struct Layout {
    pub(super) weights: Parts,
    pub(super) biases: Parts,
    /// Matrix and bias.
    pub(super) output: [String; 2],
    pub(super) stored: StoredAxes,
    pub(super) always_biased: bool,
    /// The pairs that the rows of query and key heads stand in.
    pub(super) rope_rows: Option<RopeStyle>,
    pub(super) sinks: Option<String>,
    /// Of queries and keys.
    pub(super) norms: Option<[String; 2]>,
    /// Whether 1 is to be added to the file's norms.
    pub(super) norms_less_1: bool,
    pub(super) relative_bias: Option<String>,
    /// Tensors that would change the result and that no layer of this crate has.
    pub(super) foreign: Vec<String>,
}

/// A name below a prefix.
fn below(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

fn weight_and_bias(name: &str) -> [String; 2] {
    [below(name, "weight"), below(name, "bias")]
}

impl Layout {
    /// Four matrices by what stands before `.weight` and `.bias`: queries, keys, values, output. They are stored
    /// `[out, in]` unless [`Layout::stored`] says otherwise, and a bias is loaded if there is one.
    ///
    /// ```
    /// use multihead::io::Layout;
    /// // A vision transformer with the names of older files.
    /// let name = |part| format!("vit.encoder.layer.0.attention.{part}");
    /// let names = ["attention.query", "attention.key", "attention.value", "output.dense"].map(name);
    /// let layout = Layout::separate(names.each_ref().map(|name| name.as_str()));
    /// # let _ = layout;
    /// ```
    pub fn separate([query, key, value, output]: [&str; 4]) -> Self {
        let [weights, biases] = [0, 1].map(|i| [query, key, value].map(|name| weight_and_bias(name)[i].clone()));
        Self::new(Parts::Separate(weights), Parts::Separate(biases), output)
    }

    /// One matrix of queries, keys and values, and that of the output, by what stands before `.weight` and `.bias`.
    ///
    /// ```
    /// use multihead::io::{Fusion, Layout, StoredAxes};
    /// let gpt2 = Layout::fused("h.0.attn.c_attn", Fusion::Blocks, "h.0.attn.c_proj");
    /// assert_eq!(gpt2.stored(StoredAxes::InOut).always_biased(), Layout::gpt2("h.0.attn"));
    /// ```
    pub fn fused(query_key_value: &str, fusion: Fusion, output: &str) -> Self {
        let [weight, bias] = weight_and_bias(query_key_value);
        Self::new(Parts::Fused(weight, fusion), Parts::Fused(bias, fusion), output)
    }

    fn new(weights: Parts, biases: Parts, output: &str) -> Self {
        Self {
            weights,
            biases,
            output: weight_and_bias(output),
            stored: StoredAxes::OutIn,
            always_biased: false,
            rope_rows: None,
            sinks: None,
            norms: None,
            norms_less_1: false,
            relative_bias: None,
            foreign: Vec::new(),
        }
    }

    /// The axes of all matrices.
    ///
    /// ```
    /// use multihead::io::{Layout, StoredAxes};
    /// let layout = Layout::separate(["q", "k", "v", "o"]).stored(StoredAxes::InOut);
    /// # let _ = layout;
    /// ```
    pub fn stored(mut self, axes: StoredAxes) -> Self {
        self.stored = axes;
        self
    }

    /// All four projections have biases in every file of this kind: one that is not there is an error.
    ///
    /// ```
    /// use multihead::{io::{Layout, Tensors, TensorMap}, MultiHeadAttention};
    /// let layout = Layout::separate(["q", "k", "v", "o"]);
    /// let mut tensors = TensorMap::new();
    /// layout.save(&MultiHeadAttention::<f32>::builder(4, 2).build()?, &mut tensors)?;
    /// let bytes = tensors.to_bytes();
    /// let builder = MultiHeadAttention::<f32>::builder(4, 2);
    /// let error = builder.load(&Tensors::from_bytes(&bytes)?, &layout.always_biased()).unwrap_err();
    /// assert_eq!(error.to_string(), "q.bias: expected in the file, got no such tensor");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn always_biased(mut self) -> Self {
        self.always_biased = true;
        self
    }

    /// The pairs that the rows of query and key heads stand in. A layer whose [`Rope`](crate::Rope) has the other style
    /// gets them reordered, with their biases and norms, so that it computes the same.
    ///
    /// ```
    /// use multihead::{io::Layout, RopeStyle};
    /// let layout = Layout::separate(["wq", "wk", "wv", "wo"]).rope_rows(RopeStyle::Interleaved);
    /// assert_eq!(layout, Layout::llama_meta(""));
    /// ```
    pub fn rope_rows(mut self, style: RopeStyle) -> Self {
        self.rope_rows = Some(style);
        self
    }

    /// The tensor of sinks, `[num_heads]`, which may be absent.
    ///
    /// ```
    /// use multihead::io::Layout;
    /// let layout = Layout::separate(["q", "k", "v", "o"]).sinks("sinks");
    /// # let _ = layout;
    /// ```
    pub fn sinks(mut self, name: &str) -> Self {
        self.sinks = Some(name.to_owned());
        self
    }

    /// The norms of query and key heads, `[head_dim]` each, which may be absent.
    ///
    /// ```
    /// use multihead::io::Layout;
    /// let layout = Layout::separate(["q", "k", "v", "o"]).qk_norms(["q_norm.weight", "k_norm.weight"]);
    /// # let _ = layout;
    /// ```
    pub fn qk_norms(mut self, [query, key]: [&str; 2]) -> Self {
        self.norms = Some([query.to_owned(), key.to_owned()]);
        self
    }

    /// The table of biases by distance, `[buckets, num_heads]`. Only a layer with buckets has one, see
    /// [`Builder::relative_bias`](crate::Builder::relative_bias).
    ///
    /// ```
    /// use multihead::io::Layout;
    /// // The later layers of T5 share the table of the first.
    /// let block = |i| format!("encoder.block.{i}.layer.0.SelfAttention");
    /// let layout = Layout::t5(&block(3)).relative_bias(&format!("{}.relative_attention_bias.weight", block(0)));
    /// # let _ = layout;
    /// ```
    pub fn relative_bias(mut self, name: &str) -> Self {
        self.relative_bias = Some(name.to_owned());
        self
    }

    /// PyTorch's `nn.MultiheadAttention` whose queries, keys and values have one width.
    ///
    /// ```
    /// let layout = multihead::io::Layout::torch("encoder.layers.0.self_attn");
    /// # let _ = layout;
    /// ```
    pub fn torch(prefix: &str) -> Self {
        let weights = Parts::Fused(below(prefix, "in_proj_weight"), Fusion::Blocks);
        Self::torch_with(prefix, weights)
    }

    /// PyTorch's `nn.MultiheadAttention` with a `kdim` or `vdim` of its own: three matrices, and still one bias.
    ///
    /// ```
    /// let layout = multihead::io::Layout::torch_separate("cross");
    /// # let _ = layout;
    /// ```
    pub fn torch_separate(prefix: &str) -> Self {
        let names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"];
        Self::torch_with(prefix, Parts::Separate(names.map(|name| below(prefix, name))))
    }

    fn torch_with(prefix: &str, weights: Parts) -> Self {
        let biases = Parts::Fused(below(prefix, "in_proj_bias"), Fusion::Blocks);
        // A key and a value that every query sees beside those of the input (`add_bias_kv`).
        let foreign = ["bias_k", "bias_v"].map(|name| below(prefix, name)).to_vec();
        Self { foreign, ..Self::new(weights, biases, &below(prefix, "out_proj")) }
    }

    /// BERT and its kin (RoBERTa, MiniLM); a prefix is `encoder.layer.0.attention`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::bert("encoder.layer.0.attention");
    /// # let _ = layout;
    /// ```
    pub fn bert(prefix: &str) -> Self {
        Self::parts(prefix, ["self.query", "self.key", "self.value", "output.dense"]).always_biased()
    }

    /// GPT-2, whose matrices are stored `[in, out]`; a prefix is `transformer.h.0.attn`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::gpt2("transformer.h.0.attn");
    /// # let _ = layout;
    /// ```
    pub fn gpt2(prefix: &str) -> Self {
        Self::fused_parts(prefix, "c_attn", Fusion::Blocks, "c_proj").stored(StoredAxes::InOut).always_biased()
    }

    /// GPT-BigCode (StarCoder): one KV head, or one for each query head; a prefix is `transformer.h.0.attn`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::gpt_bigcode("transformer.h.0.attn");
    /// # let _ = layout;
    /// ```
    pub fn gpt_bigcode(prefix: &str) -> Self {
        Self::fused_parts(prefix, "c_attn", Fusion::Groups, "c_proj").always_biased()
    }

    /// GPT-NeoX and Pythia; a prefix is `gpt_neox.layers.0.attention`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::gpt_neox("gpt_neox.layers.0.attention");
    /// # let _ = layout;
    /// ```
    pub fn gpt_neox(prefix: &str) -> Self {
        Self::fused_parts(prefix, "query_key_value", Fusion::Groups, "dense").rope_rows(RopeStyle::HalfSplit)
    }

    /// Falcon, with one KV head, with groups, or with one for each query head; a prefix is
    /// `transformer.h.0.self_attention`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::falcon("transformer.h.0.self_attention");
    /// # let _ = layout;
    /// ```
    pub fn falcon(prefix: &str) -> Self {
        Self::fused_parts(prefix, "query_key_value", Fusion::Groups, "dense").rope_rows(RopeStyle::HalfSplit)
    }

    /// LLaMA as Hugging Face stores it, and those that followed it: Mistral, Qwen, Gemma 1 and 2, gpt-oss. What a family
    /// adds (biases, norms, sinks) is loaded if the file has it. A prefix is `model.layers.0.self_attn`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::llama("model.layers.0.self_attn");
    /// # let _ = layout;
    /// ```
    #[doc(alias = "mistral")]
    #[doc(alias = "qwen")]
    #[doc(alias = "gemma")]
    #[doc(alias = "gpt_oss")]
    pub fn llama(prefix: &str) -> Self {
        let norms = ["q_norm.weight", "k_norm.weight"].map(|name| below(prefix, name));
        let layout = Self::parts(prefix, ["q_proj", "k_proj", "v_proj", "o_proj"]).rope_rows(RopeStyle::HalfSplit);
        layout.qk_norms(norms.each_ref().map(String::as_str)).sinks(&below(prefix, "sinks"))
    }

    /// Gemma 3, whose files hold norms less 1. `1 + w` is rounded when it is loaded, as it is where the family comes from.
    ///
    /// ```
    /// let layout = multihead::io::Layout::gemma3("model.layers.0.self_attn");
    /// # let _ = layout;
    /// ```
    pub fn gemma3(prefix: &str) -> Self {
        Self { norms_less_1: true, ..Self::llama(prefix) }
    }

    /// LLaMA as Meta stores it; a prefix is `layers.0.attention`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::llama_meta("layers.0.attention");
    /// # let _ = layout;
    /// ```
    pub fn llama_meta(prefix: &str) -> Self {
        Self::parts(prefix, ["wq", "wk", "wv", "wo"]).rope_rows(RopeStyle::Interleaved)
    }

    /// T5, whose scale is 1; a prefix is `encoder.block.0.layer.0.SelfAttention`. Only the first layer of a stack has a
    /// table of its own, see [`Layout::relative_bias`] for the others.
    ///
    /// ```
    /// let layout = multihead::io::Layout::t5("encoder.block.0.layer.0.SelfAttention");
    /// # let _ = layout;
    /// ```
    pub fn t5(prefix: &str) -> Self {
        Self::parts(prefix, ["q", "k", "v", "o"]).relative_bias(&below(prefix, "relative_attention_bias.weight"))
    }

    /// ViT; a prefix is `layers.0.attention`. See [`Layout::separate`] for the names of older files.
    ///
    /// ```
    /// let layout = multihead::io::Layout::vit("layers.0.attention");
    /// # let _ = layout;
    /// ```
    pub fn vit(prefix: &str) -> Self {
        Self::parts(prefix, ["q_proj", "k_proj", "v_proj", "o_proj"])
    }

    /// DETR; a prefix is `encoder.layers.0.self_attn` or `decoder.layers.0.encoder_attn`.
    ///
    /// ```
    /// let layout = multihead::io::Layout::detr("decoder.layers.0.encoder_attn");
    /// # let _ = layout;
    /// ```
    pub fn detr(prefix: &str) -> Self {
        Self::parts(prefix, ["q_proj", "k_proj", "v_proj", "o_proj"]).always_biased()
    }

    fn parts(prefix: &str, names: [&str; 4]) -> Self {
        let names = names.map(|name| below(prefix, name));
        Self::separate(names.each_ref().map(String::as_str))
    }

    fn fused_parts(prefix: &str, query_key_value: &str, fusion: Fusion, output: &str) -> Self {
        Self::fused(&below(prefix, query_key_value), fusion, &below(prefix, output))
    }
}
