//! The contract, one question per file. One program, because linking one for each file takes minutes; what counts
//! allocations or reads a folder is a program of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod accuracy;
mod any_input;
mod block_gradients;
mod block_parts;
mod blocks;
mod bug_reports_gradients;
mod bug_reports_masks;
mod bug_reports_shapes;
mod cache;
mod configurations;
mod decode;
mod distance_gradients;
mod distances;
mod dropout;
mod errors;
mod gradient_tiles;
mod gradients;
mod head_statistics;
mod head_surgery;
mod hidden_queries;
mod layer_options;
mod loading;
mod prepack;
mod properties;
mod qk_norm;
mod ring;
mod rope;
mod segments;
mod steps;
mod threads;
mod tiles;
mod train;
mod train_bug_reports;
mod train_refused;
