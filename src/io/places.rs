//! Which numbers of which tensor an array of a layer consists of.
//!
//! ```text
//! [out, in]   output r is the run  r * in .. (r + 1) * in
//! [in, out]   output r is the number  i * out + r  of each row i
//! ```
//!
//! Loading gathers the numbers of these ranges, saving scatters them to the same ranges, so the one undoes the other by
//! construction.

use std::ops::Range;

use super::layout::{Fusion, Layout, Parts, StoredAxes};
use crate::mha::Config;
use crate::position::RopeStyle;

/// What a projection of the inputs makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Query,
    Key,
    Value,
}

pub(super) const PARTS: [Part; 3] = [Part::Query, Part::Key, Part::Value];

/// Which outputs of a tensor are meant.
#[derive(Debug, Clone, Copy)]
enum Features {
    All(usize),
    /// The heads of a part, alone in their tensor or cut from a fused one.
    Heads(Part, Option<Fusion>),
    /// The columns of one query or key head.
    Head,
}

/// The place of one array of a layer in one tensor of a file.
#[derive(Debug)]
pub(super) struct Place<'l> {
    pub(super) name: &'l str,
    /// The tensor's axes in words, and their lengths.
    pub(super) axes: &'static str,
    pub(super) shape: Vec<usize>,
    features: Features,
    /// How many numbers of an output lie together.
    run: usize,
    /// How often the outputs are repeated.
    rows: usize,
    layout: &'l Layout,
    config: &'l Config,
}

/// The places of all arrays of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places<'l> {
    pub(super) layout: &'l Layout,
    pub(super) config: &'l Config,
}

impl<'l> Places<'l> {
    pub(super) fn matrix(self, part: Part) -> Place<'l> {
        let (name, features, outputs) = self.within(&self.layout.weights, part);
        let inputs = match part {
            Part::Query => self.config.d_model,
            Part::Key => self.config.k_dim,
            Part::Value => self.config.v_dim,
        };
        self.linear(name, features, inputs, outputs)
    }

    pub(super) fn bias(self, part: Part) -> Place<'l> {
        let (name, features, outputs) = self.within(&self.layout.biases, part);
        self.vector(name, features, outputs)
    }

    pub(super) fn output_matrix(self) -> Place<'l> {
        let [_, _, _, (inputs, outputs)] = self.config.shapes();
        self.linear(&self.layout.output[0], Features::All(outputs), inputs, outputs)
    }

    pub(super) fn output_bias(self) -> Place<'l> {
        let outputs = self.config.d_model;
        self.vector(&self.layout.output[1], Features::All(outputs), outputs)
    }

    pub(super) fn sinks(self) -> Option<Place<'l>> {
        let heads = self.config.heads.num_heads();
        let place = self.vector(self.layout.sinks.as_deref()?, Features::All(heads), heads);
        Some(Place { axes: "[num_heads]", ..place })
    }

    /// The norms of queries and of keys.
    pub(super) fn norms(self) -> Option<[Place<'l>; 2]> {
        let norm = |name| Place { axes: "[head_dim]", ..self.vector(name, Features::Head, self.config.head_dim) };
        self.layout.norms.as_ref().map(|names| names.each_ref().map(|name| norm(name)))
    }

    /// The biases of distances; a layer without buckets has none.
    pub(super) fn table(self) -> Option<Place<'l>> {
        let (name, heads) = (self.layout.relative_bias.as_deref()?, self.config.heads.num_heads());
        let buckets = self.config.relative_bias.as_ref()?.count();
        let place = self.vector(name, Features::All(heads), heads);
        Some(Place { axes: "[buckets, num_heads]", shape: vec![buckets, heads], rows: buckets, ..place })
    }

    fn within(self, parts: &'l Parts, part: Part) -> (&'l str, Features, usize) {
        let [(_, q), (_, k), (_, v), _] = self.config.shapes();
        match parts {
            Parts::Separate([query, key, value]) => {
                let (name, outputs) = match part {
                    Part::Query => (query, q),
                    Part::Key => (key, k),
                    Part::Value => (value, v),
                };
                (name, Features::Heads(part, None), outputs)
            }
            Parts::Fused(name, fusion) => {
                (name, Features::Heads(part, Some(*fusion)), q.saturating_add(k).saturating_add(v))
            }
        }
    }

    fn linear(self, name: &'l str, features: Features, inputs: usize, outputs: usize) -> Place<'l> {
        let (axes, shape, run, rows) = match self.layout.stored {
            StoredAxes::OutIn => ("[out, in]", vec![outputs, inputs], inputs, 1),
            StoredAxes::InOut => ("[in, out]", vec![inputs, outputs], 1, inputs),
        };
        Place { name, axes, shape, features, run, rows, layout: self.layout, config: self.config }
    }

    fn vector(self, name: &'l str, features: Features, len: usize) -> Place<'l> {
        let (layout, config) = (self.layout, self.config);
        Place { name, axes: "[out]", shape: vec![len], features, run: 1, rows: 1, layout, config }
    }
}

impl Place<'_> {
    /// Whether the numbers lie output by output, so that an array `[in, out]` is to be taken column by column.
    pub(super) fn is_by_outputs(&self) -> bool {
        self.rows == 1
    }

    /// How many numbers belong to an output.
    pub(super) fn inputs(&self) -> usize {
        self.rows * self.run
    }

    /// The numbers of the array, in the order of its stored axes: `[out, in]` or `[in, out]` with its own outputs. To be
    /// asked after a tensor of this shape has been found, for the sizes may be as large as they like before that.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let outputs = self.outputs();
        let stride = self.shape.iter().product::<usize>() / self.rows.max(1);
        (0..self.rows).flat_map(move |row| {
            let number = move |output: usize| row * stride + output * self.run;
            outputs.clone().into_iter().map(move |range| number(range.start)..number(range.end))
        })
    }

    fn outputs(&self) -> Vec<Range<usize>> {
        let Config { heads, head_dim, value_dim, .. } = self.config;
        let (part, fusion) = match self.features {
            Features::All(count) => return one(0..count),
            Features::Head => return self.columns(0),
            Features::Heads(part, fusion) => (part, fusion),
        };
        let starts: Vec<usize> = match (part, fusion) {
            (Part::Query, Some(Fusion::Groups)) => (0..heads.num_heads())
                .map(|head| {
                    let group = heads.read_by(head);
                    let before = heads.query_heads(group).take_while(|&other| other < head).count();
                    self.group_start(group) + before * head_dim
                })
                .collect(),
            (_, Some(Fusion::Groups)) => (0..heads.num_kv_heads())
                .map(|group| {
                    let queries = heads.query_heads(group).count() * head_dim;
                    let key = if part == Part::Value { *head_dim } else { 0 };
                    self.group_start(group) + queries + key
                })
                .collect(),
            (_, fusion) => {
                let [(_, q), (_, k), ..] = self.config.shapes();
                let (before, count, width) = match part {
                    Part::Query => (0, heads.num_heads(), *head_dim),
                    Part::Key => (q, heads.num_kv_heads(), *head_dim),
                    Part::Value => (q + k, heads.num_kv_heads(), *value_dim),
                };
                let before = if fusion.is_some() { before } else { 0 };
                (0..count).map(|head| before + head * width).collect()
            }
        };
        match part {
            Part::Value => starts.into_iter().map(|start| start..start + value_dim).collect(),
            Part::Query | Part::Key => starts.into_iter().flat_map(|start| self.columns(start)).collect(),
        }
    }

    /// Where the queries of a group begin: behind the queries, keys and values of the groups before it.
    fn group_start(&self, group: usize) -> usize {
        let Config { heads, head_dim, value_dim, .. } = self.config;
        let queries: usize = (0..group).map(|group| heads.query_heads(group).count()).sum();
        queries * head_dim + group * (head_dim + value_dim)
    }

    /// The columns of a query or key head that begins at `start`, in the order of the layer.
    fn columns(&self, start: usize) -> Vec<Range<usize>> {
        let width = self.config.head_dim;
        let (Some(rope), Some(rows)) = (&self.config.rope, self.layout.rope_rows) else {
            return one(start..start + width);
        };
        if rope.style() == rows {
            return one(start..start + width);
        }
        let turned = rope.turned(width);
        let column = |i: usize| match rows {
            // The layer has the halves one behind the other, the file has pairs.
            RopeStyle::Interleaved => 2 * (i % (turned / 2)) + i / (turned / 2),
            RopeStyle::HalfSplit => i / 2 + i % 2 * (turned / 2),
        };
        let mut columns: Vec<_> = (0..turned).map(|i| start + column(i)).map(|i| i..i + 1).collect();
        columns.push(start + turned..start + width);
        columns
    }
}

fn one(range: Range<usize>) -> Vec<Range<usize>> {
    vec![range]
}
