//! The scalar types of the kernels, `f32` and `f64`, with the constants that depend on the type.

use super::{Kernels, Level};
use num_traits::Float;
use std::fmt::Debug;

/// `f32` or `f64`: what a lane of a vector holds.
pub(crate) trait Real: Float + Default + Debug + Send + Sync + 'static {
    /// log2(e), which turns an exponent of e into one of 2.
    const LOG2_E: Self;
    /// Coefficients `c` of `2^(1 + x) ≈ c[0] + x (c[1] + x (c[2] + ...))` for |x| <= 1/2: see `exp.rs`.
    const EXP2: &'static [Self];
    /// The same of `2^x` for 0 <= x < 1.
    const EXP2_FROM_ZERO: &'static [Self];
    /// Coefficients `c` of `tanh(x) ≈ x + x z (c[0] + z (c[1] + ...))`, `z = x²`, for |x| < 0.625: see `exp.rs`.
    const TANH: &'static [Self];
    /// Coefficients of the tail of the normal distribution: see `normal.rs`.
    const NORMAL_TAIL: &'static [Self];
    /// Where `tanh` changes from the polynomial to the exponential.
    const TANH_NEAR: Self;
    /// What the powers of a few scores may sum up to before the reference of their row moves: see `softmax.rs`.
    const MOST_POWER: Self;
    /// The smallest integer whose power of two is not flushed to zero.
    const MIN_EXPONENT: Self;
    /// The smallest integer whose power of two is infinite.
    const OVERFLOW_EXPONENT: Self;

    /// Adding it rounds a number to the nearest integer `n`, and leaves the exponent field of `2^(n - 1)` in the low bits
    /// of the sum. (A larger number has no fraction bits.)
    const TO_EXPONENT: Self;

    /// The number whose exponent field is the low bits of this one, and whose fraction is zero.
    fn exponent_to_power(self) -> Self;

    /// `self * factor + addend`, fused where the target's baseline has the instruction: elsewhere the fused form is a
    /// library call that costs fifty times as much.
    fn multiply_add(self, factor: Self, addend: Self) -> Self;

    /// The same number in `f64`.
    fn wide(self) -> f64;

    /// The nearest number.
    fn nearest(x: f64) -> Self;

    /// The kernels of a level, or the portable ones if this CPU cannot run it.
    fn kernels(level: Level) -> &'static Kernels<Self>;
}

macro_rules! real {
    ($t:ident, $bits:ident, $kernels:path, EXP2 = [$exp2:expr, $from_zero:expr], TANH = $tanh:expr, NORMAL_TAIL = $tail:expr) => {
        impl Real for $t {
            const LOG2_E: Self = std::$t::consts::LOG2_E;
            const EXP2: &'static [Self] = &$exp2;
            const EXP2_FROM_ZERO: &'static [Self] = &$from_zero;
            const TANH: &'static [Self] = &$tanh;
            const NORMAL_TAIL: &'static [Self] = &$tail;
            const TANH_NEAR: Self = 0.625;
            const MOST_POWER: Self = 400.0;
            const MIN_EXPONENT: Self = $t::MIN_EXP as Self;
            const OVERFLOW_EXPONENT: Self = $t::MAX_EXP as Self;

            // The field of 2^0 is MAX_EXP - 1.
            const TO_EXPONENT: Self =
                1.5 * ((1 as $bits) << ($t::MANTISSA_DIGITS - 1)) as Self + ($t::MAX_EXP - 2) as Self;

            #[inline(always)]
            fn exponent_to_power(self) -> Self {
                Self::from_bits(self.to_bits() << ($t::MANTISSA_DIGITS - 1))
            }

            #[inline(always)]
            fn multiply_add(self, factor: Self, addend: Self) -> Self {
                if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                    self.mul_add(factor, addend)
                } else {
                    self * factor + addend
                }
            }

            #[inline(always)]
            fn wide(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            #[allow(clippy::unnecessary_cast, reason = "the macro is for both types")]
            fn nearest(x: f64) -> Self {
                x as Self
            }

            fn kernels(level: Level) -> &'static Kernels<Self> {
                $kernels(level)
            }
        }
    };
}

real!(
    f32,
    u32,
    crate::kernels::kernels_f32,
    EXP2 = [
        [2.0, 1.386_294_4, 0.480_452_95, 0.111_006_65, 0.019_236_874, 0.002_679_774_8, 0.000_307_067_24],
        [1.0, 0.693_147_04, 0.240_229_3, 0.055_485_28, 0.009_675_452, 0.001_246_784_6, 0.000_216_129_15]
    ],
    TANH = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_088, -0.005_704_987_4],
    NORMAL_TAIL = [
        0.179_001_15,
        -0.326_233_57,
        0.245_603_62,
        -0.150_115_82,
        0.071_667_98,
        -0.024_393_462,
        0.004_259_767,
        0.000_711_146_4,
        -0.000_578_156_03,
        3.929_736_7e-5,
        4.564_089e-5,
        -7.599_684e-6,
    ]
);

real!(
    f64,
    u64,
    crate::kernels::kernels_f64,
    EXP2 = [
        [
            2.0,
            1.386_294_361_119_890_6,
            0.480_453_013_918_202_6,
            0.111_008_217_329_640_17,
            0.019_236_258_215_188_24,
            0.002_666_711_629_354_924_5,
            0.000_308_070_609_142_242_64,
            0.000_030_505_466_986_251_35,
            2.643_087_056_458_365_3e-6,
            2.035_639_914_528_117_2e-7,
            1.414_756_650_177_134_7e-8,
            8.869_542_345_845_254e-10,
        ],
        [
            1.0,
            0.693_147_180_559_946,
            0.240_226_506_959_063_3,
            0.055_504_108_665_602_23,
            0.009_618_129_099_550_946,
            0.001_333_355_862_956_047_2,
            0.000_154_035_123_097_949_04,
            0.000_015_253_175_052_704_244,
            1.320_836_732_083_647_8e-6,
            1.025_321_221_306_013e-7,
            6.559_530_207_646_565e-9,
            6.263_464_614_424_121e-10,
        ]
    ],
    TANH = [
        -0.333_333_333_333_328_54,
        0.133_333_333_332_620_9,
        -0.053_968_253_931_267_696,
        0.021_869_487_576_094_505,
        -0.008_863_221_002_629_504,
        0.003_591_989_173_801_534,
        -0.001_454_958_877_886_363_8,
        0.000_586_316_539_897_503_1,
        -0.000_228_564_210_011_454_92,
        0.000_077_144_365_154_119_47,
        -0.000_016_072_568_841_506_045,
    ],
    NORMAL_TAIL = [
        0.179_001_151_181_389_96,
        -0.326_233_560_043_037_2,
        0.245_603_801_712_330_76,
        -0.150_115_936_500_777_87,
        0.071_665_837_197_984_35,
        -0.024_392_499_318_647_093,
        0.004_269_136_332_695_935,
        0.000_707_746_438_492_248_9,
        -0.000_597_061_946_750_467_8,
        4.525_530_265_970_93e-5,
        6.405_654_220_809_724e-5,
        -1.286_052_094_564_349_3e-5,
        -7.978_071_289_340_513e-6,
        2.120_087_120_717_892_3e-6,
        1.252_323_023_119_243_9e-6,
        -2.940_570_486_081_15e-7,
        -2.343_345_275_536_8e-7,
        2.846_944_147_894_228_3e-8,
        4.651_846_870_855_633e-8,
        1.392_072_822_087_853_6e-9,
        -8.605_536_997_811_747e-9,
        -1.623_485_641_633_766_7e-9,
        1.252_193_556_228_664_7e-9,
        4.211_985_911_778_417_4e-10,
        -1.021_901_251_060_456_1e-10,
        -4.704_348_312_594_46e-11,
    ]
);
