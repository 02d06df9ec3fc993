//! The CPU side: threads, instruction-set dispatch, one kernel family a file.
//!
//! Every kernel is written once over sixteen `f32` lanes (`lanes`) and compiled for each instruction set;
//! [`simd`] picks the set at run time. The sets with a fused multiply-add (AVX2, AVX-512, NEON) give the same
//! bits as one another; `portable` rounds after each multiply and differs in the last places.

mod lanes;
pub mod math;
pub mod matmul;
pub mod simd;
pub mod vector;

pub use simd::Isa;
