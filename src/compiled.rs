//! What is compiled once, in this crate, and not again in every crate that calls it.
//!
//! Generic functions are compiled where they are used. The bodies of these methods belong to `f32` and `f64` and to no
//! type parameter, so the paths and kernels below them are part of this crate's own object code: programs that use the
//! crate compile in the time that their own code takes.

use ndarray::{ArrayRef4, ArrayView2};

use crate::attention::{self, Dims, GradientsMut, NewTokens, Options, Outputs, Saved, Workspace};
use crate::block::{self, Activation, Part};
use crate::cache::Slots;
use crate::error::Result;
use crate::inspect::{self, HeadStatistics, Tokens};
use crate::kernels::{Level, NormInput, Prepacked, Real};
use crate::linear::{self, Projected, Terms, WeightGradient};
use crate::norm::RowNorm;
use crate::parallel;
use crate::position::{self, Heads, Rope, RopeTable, Turn};

/// The entry points of the heavy code.
pub(crate) trait Compiled: Real {
    /// Checks all arguments of a call; returns its lengths.
    fn check(qkv: [&ArrayRef4<Self>; 3], options: &Options<'_, Self>) -> Result<Dims>;

    /// Checks what can be checked before there are queries, keys and values.
    fn check_rules(dims: Dims, options: &Options<'_, Self>) -> Result<()>;

    /// Attention into outputs whose shapes are those of the call.
    fn attend(
        qkv: [&ArrayRef4<Self>; 3],
        options: &Options<'_, Self>,
        outputs: Outputs<'_, Self>,
        workspace: &mut Workspace<Self>,
    ) -> Result<()>;

    /// Checks all arguments of backward but the gradients; returns the call's lengths.
    fn check_saved(saved: &Saved<'_, Self>, options: &Options<'_, Self>) -> Result<Dims>;

    /// The gradients of attention into arrays whose shapes are those of the call.
    fn differentiate(
        saved: &Saved<'_, Self>,
        d_context: &ArrayRef4<Self>,
        options: &Options<'_, Self>,
        gradients: GradientsMut<'_, Self>,
        workspace: &mut Workspace<Self>,
    ) -> Result<()>;

    /// Checks all arguments of a decode; returns its lengths.
    fn check_decode(q: &ArrayRef4<Self>, cache: &dyn Slots<Self>, options: &Options<'_, Self>) -> Result<Dims>;

    /// As `check_decode`, before there are queries.
    fn check_reading(
        num_heads: usize,
        q_len: usize,
        cache: &dyn Slots<Self>,
        options: &Options<'_, Self>,
    ) -> Result<Dims>;

    /// Attention over a cache into outputs whose shapes are those of the call.
    fn decode(
        q: &ArrayRef4<Self>,
        cache: &dyn Slots<Self>,
        options: &Options<'_, Self>,
        outputs: Outputs<'_, Self>,
        workspace: &mut Workspace<Self>,
    ) -> Result<()>;

    /// Checks all arguments of an extension; returns its lengths.
    fn check_extend(
        tokens: &NewTokens<'_, Self>,
        cache: &mut dyn Slots<Self>,
        options: &Options<'_, Self>,
    ) -> Result<Dims>;

    /// As `check_extend`, before there are arrays.
    fn plan(num_heads: usize, q_len: usize, cache: &mut dyn Slots<Self>, options: &Options<'_, Self>) -> Result<Dims>;

    /// Appends tokens and attends with their queries.
    fn extend(
        tokens: &NewTokens<'_, Self>,
        cache: &mut dyn Slots<Self>,
        options: &Options<'_, Self>,
        outputs: Outputs<'_, Self>,
        workspace: &mut Workspace<Self>,
    ) -> Result<()>;

    /// What each head does.
    fn head_statistics(of: inspect::Attention<'_, '_, Self>, tokens: &Tokens<'_>) -> Result<HeadStatistics>;

    /// Packs weights `[in, out]` for projections. The error is the index of the first that there is no memory for.
    fn prepack(weights: &[ArrayView2<'_, Self>]) -> Result<Vec<Prepacked<Self>>, usize>;

    /// Projections, together.
    fn project(level: Level, projections: [Option<Projected<'_, Self>>; 3], scratch: &mut Vec<Vec<Self>>);

    /// Normalises heads, `[.., head_dim]` one after the other, or what takes their place.
    fn normalise(norm: &RowNorm<'_, Self>, input: NormInput<'_, Self>, heads: &mut [Self]);

    /// Adds the numbers of `y` to those of `x`.
    fn add_all(x: &mut [Self], y: &[Self]);

    /// Multiplies the numbers of `x` by those of `y`.
    fn multiply_all(x: &mut [Self], y: &[Self]);

    /// From the gradient of normalised heads to that of the heads before, and what the weight's gradient gets of it.
    fn differentiate_norm(
        norm: &RowNorm<'_, Self>,
        heads: &[Self],
        d_heads: &mut [Self],
        d_weight: &mut [Self],
        room: &mut Vec<Self>,
    ) -> Result<()>;

    /// The gradients of their weights, together.
    fn weight_gradients(
        level: Level,
        gradients: [Option<WeightGradient<'_, Self>>; 3],
        terms: Terms<'_>,
        scratch: &mut Vec<Vec<Self>>,
    );

    /// Replaces each number by the value or the slope of a function there.
    fn activate(level: Level, activation: Activation, part: Part, numbers: &mut [Self]);

    /// Turns heads by their positions.
    fn rotate(
        rope: &Rope,
        heads: [Option<Heads<'_, '_, Self>>; 2],
        turn: Turn,
        table: &mut RopeTable<Self>,
    ) -> Result<()>;
}

macro_rules! compiled {
    ($($t:ty),*) => {$(
        impl Compiled for $t {
            fn check(qkv: [&ArrayRef4<Self>; 3], options: &Options<'_, Self>) -> Result<Dims> {
                attention::check(qkv, options)
            }

            fn check_rules(dims: Dims, options: &Options<'_, Self>) -> Result<()> {
                attention::check_rules(dims, options)
            }

            fn attend(
                qkv: [&ArrayRef4<Self>; 3],
                options: &Options<'_, Self>,
                outputs: Outputs<'_, Self>,
                workspace: &mut Workspace<Self>,
            ) -> Result<()> {
                attention::attend(qkv, options, outputs, workspace)
            }

            fn check_saved(saved: &Saved<'_, Self>, options: &Options<'_, Self>) -> Result<Dims> {
                attention::check_saved(saved, options)
            }

            fn differentiate(
                saved: &Saved<'_, Self>,
                d_context: &ArrayRef4<Self>,
                options: &Options<'_, Self>,
                gradients: GradientsMut<'_, Self>,
                workspace: &mut Workspace<Self>,
            ) -> Result<()> {
                attention::differentiate(saved, d_context, options, gradients, workspace)
            }

            fn check_decode(q: &ArrayRef4<Self>, cache: &dyn Slots<Self>, options: &Options<'_, Self>) -> Result<Dims> {
                attention::check_decode(q, cache, options)
            }

            fn check_reading(
                num_heads: usize,
                q_len: usize,
                cache: &dyn Slots<Self>,
                options: &Options<'_, Self>,
            ) -> Result<Dims> {
                attention::check_reading(num_heads, q_len, cache, options)
            }

            fn decode(
                q: &ArrayRef4<Self>,
                cache: &dyn Slots<Self>,
                options: &Options<'_, Self>,
                outputs: Outputs<'_, Self>,
                workspace: &mut Workspace<Self>,
            ) -> Result<()> {
                attention::decode_checked(q, cache, options, outputs, workspace)
            }

            fn check_extend(
                tokens: &NewTokens<'_, Self>,
                cache: &mut dyn Slots<Self>,
                options: &Options<'_, Self>,
            ) -> Result<Dims> {
                attention::check_extend(tokens, cache, options)
            }

            fn plan(
                num_heads: usize,
                q_len: usize,
                cache: &mut dyn Slots<Self>,
                options: &Options<'_, Self>,
            ) -> Result<Dims> {
                attention::plan(num_heads, q_len, cache, options)
            }

            fn extend(
                tokens: &NewTokens<'_, Self>,
                cache: &mut dyn Slots<Self>,
                options: &Options<'_, Self>,
                outputs: Outputs<'_, Self>,
                workspace: &mut Workspace<Self>,
            ) -> Result<()> {
                attention::extend_checked(tokens, cache, options, outputs, workspace)
            }

            fn head_statistics(of: inspect::Attention<'_, '_, Self>, tokens: &Tokens<'_>) -> Result<HeadStatistics> {
                inspect::head_statistics(of, tokens)
            }

            fn prepack(weights: &[ArrayView2<'_, Self>]) -> Result<Vec<Prepacked<Self>>, usize> {
                Prepacked::several(weights)
            }

            fn project(level: Level, projections: [Option<Projected<'_, Self>>; 3], scratch: &mut Vec<Vec<Self>>) {
                linear::project(Self::kernels(level), projections, scratch);
            }

            fn normalise(norm: &RowNorm<'_, Self>, input: NormInput<'_, Self>, heads: &mut [Self]) {
                norm.apply(Self::kernels(Level::best()), input, heads);
            }

            fn add_all(x: &mut [Self], y: &[Self]) {
                parallel::for_each_pair(x, y, |x, y| *x += y);
            }

            fn multiply_all(x: &mut [Self], y: &[Self]) {
                parallel::for_each_pair(x, y, |x, y| *x *= y);
            }

            fn differentiate_norm(
                norm: &RowNorm<'_, Self>,
                heads: &[Self],
                d_heads: &mut [Self],
                d_weight: &mut [Self],
                room: &mut Vec<Self>,
            ) -> Result<()> {
                norm.differentiate(heads, d_heads, d_weight, room)
            }

            fn weight_gradients(
                level: Level,
                gradients: [Option<WeightGradient<'_, Self>>; 3],
                terms: Terms<'_>,
                scratch: &mut Vec<Vec<Self>>,
            ) {
                linear::weight_gradients(Self::kernels(level), gradients, terms, scratch);
            }

            fn activate(level: Level, activation: Activation, part: Part, numbers: &mut [Self]) {
                block::activate(Self::kernels(level), activation, part, numbers);
            }

            fn rotate(
                rope: &Rope,
                heads: [Option<Heads<'_, '_, Self>>; 2],
                turn: Turn,
                table: &mut RopeTable<Self>,
            ) -> Result<()> {
                position::rotate(rope, heads.into_iter().flatten(), turn, table)
            }
        }
    )*};
}

compiled!(f32, f64);
