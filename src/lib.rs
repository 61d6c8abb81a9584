//! Multi-head attention for `ndarray`.
