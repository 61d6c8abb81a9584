//! Where a token stands, and how queries and keys come to know it.
//!
//! | | |
//! | --- | --- |
//! | [`Positions`] | the positions of the tokens of a call |
//! | [`Rope`] | which columns of a head turn, and how fast |
//! | [`RopeScaling`] | slower turns for texts longer than those of the training |
//! | [`Alibi`] | a bias that falls with the distance |
//! | [`Buckets`] | ranges of distances, for a learned bias |
//! | [`sinusoidal`] | tables that are added to the inputs of a model |

mod alibi;
mod far;
mod ids;
mod relative;
mod rope;
mod rotate;
mod scaling;
mod sinusoidal;

pub use alibi::Alibi;
pub(crate) use far::{FAR, whole};
pub use ids::Positions;
pub use relative::Buckets;
pub use rope::{Rope, RopeStyle};
pub(crate) use rotate::{Heads, RopeTable, Turn, rotate};
pub use scaling::{Llama3, RopeScaling, Yarn};
pub use sinusoidal::sinusoidal;
