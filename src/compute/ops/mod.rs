//! The operations, one family a file. Each computes whole rows, and a row's result does not depend on how many
//! rows share the pass or on the number of threads.

pub mod kda;
pub mod matmul;
pub mod mla;
pub mod moe;
pub mod norm;
pub mod residual;

use std::marker::PhantomData;

/// A mutable slice shared by parallel tasks that write disjoint ranges of it.
pub(crate) struct Disjoint<'a> {
    ptr: *mut f32,
    len: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: access goes through `range`, whose contract makes the ranges of different tasks disjoint.
unsafe impl Sync for Disjoint<'_> {}
// SAFETY: as above; f32 has no thread affinity.
unsafe impl Send for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(crate) fn new(values: &'a mut [f32]) -> Disjoint<'a> {
        Disjoint { ptr: values.as_mut_ptr(), len: values.len(), life: PhantomData }
    }

    /// The `count` values at `start`.
    ///
    /// # Safety
    /// No other live reference may overlap the range.
    ///
    /// # Panics
    /// If the range is outside the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, start: usize, count: usize) -> &mut [f32] {
        assert!(start.checked_add(count).is_some_and(|end| end <= self.len));
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), count) }
    }
}
