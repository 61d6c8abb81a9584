//! The rules of masks, written out pair by pair.
