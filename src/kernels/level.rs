//! Which instruction set the kernels use: the widest one this CPU has, or the one the user names.
//!
//! Results are bitwise equal for any number of threads at one level; between levels they agree within rounding.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The instruction set that the kernels are compiled for.
///
/// ```
/// use multihead::Level;
///
/// assert!(Level::best().is_available());
/// assert_eq!("avx2".parse(), Ok(Level::Avx2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// [`Level::Avx512`] with the matrix unit AMX, for products of `f32` with many rows: each is six products of `bf16`, whose
    /// sum is no less exact. Linux is asked once, for the whole process, to let it use the unit. Attention of few queries goes
    /// without, unless a call asks for this level by name.
    Amx,
    /// x86-64 with AVX-512 F and DQ: vectors of 64 bytes.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C: vectors of 32 bytes.
    Avx2,
    /// Any CPU: lane arrays of 16 bytes that the compiler vectorises for the target's baseline (SSE2, NEON).
    Portable,
}

/// A text that is not the name of a [`Level`].
///
/// ```
/// let error = "avx1024".parse::<multihead::Level>().unwrap_err();
/// assert_eq!(error.to_string(), "level: expected one of amx, avx512, avx2, portable, got avx1024");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("level: expected one of amx, avx512, avx2, portable, got {0}")]
pub struct UnknownLevel(String);

/// Every level, best first.
const ALL: [Level; 4] = [Level::Amx, Level::Avx512, Level::Avx2, Level::Portable];

impl Level {
    /// Every level this CPU can run, best first. The last one is always [`Level::Portable`].
    ///
    /// ```
    /// use multihead::Level;
    /// assert_eq!(Level::available().last(), Some(&Level::Portable));
    /// ```
    #[must_use]
    pub fn available() -> &'static [Self] {
        let missing = ALL.iter().take_while(|level| !level.is_available());
        // Each of them is checked for what the next one needs, so what is available is a suffix of `ALL`.
        &ALL[missing.count()..]
    }

    /// The level used when none is asked for: the first of [`Level::available`].
    ///
    /// The environment variable `MULTIHEAD_LEVEL` (`amx`, `avx512`, `avx2` or `portable`) chooses another one for the whole
    /// process. It is read once; a name that is unknown, or that this CPU cannot run, is ignored.
    ///
    /// ```
    /// use multihead::Level;
    /// assert!(Level::available().contains(&Level::best()));
    /// ```
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let forced = std::env::var("MULTIHEAD_LEVEL").ok().and_then(|name| name.parse().ok());
            forced.filter(|level: &Level| level.is_available()).unwrap_or(Self::available()[0])
        })
    }

    /// Whether this CPU and operating system can run the level.
    ///
    /// ```
    /// assert!(multihead::Level::Portable.is_available());
    /// ```
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_available() && super::amx::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") && Self::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Self::Portable => true,
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The name that [`FromStr`] reads.
    const fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(name: &str) -> Result<Self, UnknownLevel> {
        ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| UnknownLevel(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for level in ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert_eq!("avx1024".parse::<Level>(), Err(UnknownLevel("avx1024".to_owned())));
    }

    #[test]
    fn available_levels_are_available_and_end_with_portable() {
        let levels = Level::available();
        assert!(levels.iter().all(|level| level.is_available()));
        assert_eq!(levels.last(), Some(&Level::Portable));
        assert_eq!(levels.len(), ALL.iter().filter(|level| level.is_available()).count());
        assert!(levels.contains(&Level::best()));
    }
}
