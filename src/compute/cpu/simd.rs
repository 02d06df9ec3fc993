//! Which instruction set the kernels use.

#[cfg(target_arch = "aarch64")]
use super::lanes::neon::Neon;
use super::lanes::{Kernel, Portable};
#[cfg(target_arch = "x86_64")]
use super::lanes::{avx2::Avx2, avx512::Avx512};
use crate::error::{Error, Result};

/// The variable that overrides the choice of [`Isa::detect`].
pub const ISA_VARIABLE: &str = "TRUNKLINE_ISA";

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust; runs everywhere.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

impl Isa {
    /// All sets, the preferred one first.
    const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// The best set of this machine, or the one named by `TRUNKLINE_ISA`.
    ///
    /// # Errors
    /// A usage error if the variable names an unknown set or one that this machine lacks.
    pub fn detect() -> Result<Isa> {
        match std::env::var_os(ISA_VARIABLE) {
            None => Ok(Isa::best()),
            Some(name) => Isa::named(&name.to_string_lossy()),
        }
    }

    /// The set called `name`, if this machine has it.
    ///
    /// # Errors
    /// A usage error if the name is unknown or the machine lacks the set.
    pub fn named(name: &str) -> Result<Isa> {
        let known = Isa::ALL.into_iter().find(|isa| isa.name() == name);
        let Some(isa) = known else {
            return Err(Error::usage("unknown instruction set")
                .key(ISA_VARIABLE)
                .expected("portable, avx2, avx512 or neon", format_args!("`{name}`")));
        };
        if isa.is_available() {
            return Ok(isa);
        }
        let usable: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
        Err(Error::usage(format!("this machine lacks the instruction set {name}"))
            .key(ISA_VARIABLE)
            .hint(format!("use one of: {}", usable.join(", "))))
    }

    /// The sets this machine has, the preferred one first; `Portable` is always among them.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The name used in `TRUNKLINE_ISA` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }

    /// Whether this machine has the set. The answer is cached by the standard library.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns)] // which arms are left depends on the target
            _ => false,
        }
    }

    fn best() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Runs `kernel` compiled for this set.
    ///
    /// # Panics
    /// If the machine lacks the set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        assert!(self.is_available(), "this machine lacks the instruction set {}", self.name());
        match self {
            // SAFETY: needs no feature.
            Isa::Portable => unsafe { kernel.run::<Portable>() },
            // SAFETY: the features were checked above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: the features were checked above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: the feature was checked above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { run_neon(kernel) },
            #[allow(unreachable_patterns)] // which arms are left depends on the target
            _ => unreachable!("availability was checked"),
        }
    }
}

// The kernel bodies are `inline(always)`, so each of these is one copy of the kernel compiled with the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<Avx512>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the feature is enabled here.
    unsafe { kernel.run::<Neon>() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn names_round_trip_for_available_sets() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(isa.name()).unwrap(), isa);
        }
        assert!(Isa::available().contains(&Isa::Portable));
    }

    #[test]
    fn unknown_and_unavailable_sets_are_usage_errors() {
        let e = Isa::named("sse9").unwrap_err();
        assert_eq!(e.kind(), Kind::Usage);
        assert!(e.to_string().contains("sse9") && e.to_string().contains(ISA_VARIABLE), "{e}");
        assert_eq!(Isa::named("AVX2").unwrap_err().kind(), Kind::Usage);
        assert_eq!(Isa::named("").unwrap_err().kind(), Kind::Usage);
        let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
        let e = Isa::named(foreign).unwrap_err();
        assert_eq!(e.kind(), Kind::Usage);
        assert!(e.hint_text().is_some_and(|h| h.contains("portable")));
    }

    #[test]
    fn the_best_set_is_available() {
        assert!(Isa::best().is_available());
    }
}
