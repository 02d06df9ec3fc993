//! Page-aligned memory that the drive reads into.

use crate::error::{Error, Result};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The page size that slabs are aligned to and rounded up to: what direct I/O asks of a buffer.
pub const PAGE: usize = 4096;

/// Zeroed, page-aligned bytes outside the allocator, so that dropping one gives its pages back at once.
///
/// A slab taken from a [`SlabPool`] goes back there instead, once its last reader has dropped it: that is what
/// makes a cache slot safe to reuse.
pub struct Slab {
    ptr: NonNull<u8>,
    len: usize,
    home: Option<Weak<SlabPool>>,
}

// SAFETY: a slab owns its mapping; shared access hands out `&[u8]` only, mutation needs `&mut`.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    /// A slab of at least `len` bytes (rounded up to whole pages), all zero.
    ///
    /// Fails with the size when the system has no address space or memory for it.
    pub fn new(len: usize) -> Result<Slab> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let fail = |cause: &dyn std::fmt::Display| {
            Error::machine(format!("cannot allocate {len} bytes of memory")).cause(cause)
        };
        let bytes = len.max(1).checked_next_multiple_of(PAGE).ok_or_else(|| fail(&"the size overflows"))?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choosing touches no memory of ours.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|e| fail(&e))?;
        let ptr = NonNull::new(at.cast::<u8>()).ok_or_else(|| fail(&"the system returned no address"))?;
        if bytes >= 4 << 20 {
            // SAFETY: the range is the mapping just made. Huge pages are a wish: refusal changes nothing but speed.
            let advice = unsafe { rustix::mm::madvise(at, bytes, rustix::mm::Advice::LinuxHugepage) };
            if let Err(e) = advice {
                log::debug!("no huge pages for a slab of {bytes} bytes: {e}");
            }
        }
        Ok(Slab { ptr, len: bytes, home: None })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes, initialised to zero by the kernel, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, to be read into.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// Size in bytes, a multiple of [`PAGE`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a slab has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A part of a slab that one reader fills.
pub struct Region {
    whole: Arc<Slab>,
    range: Range<usize>,
}

impl Region {
    /// The bytes, to be read into.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `split` made regions that do not overlap and lie inside the slab, and nobody else can reach its bytes
        // before all regions are dropped.
        unsafe {
            std::slice::from_raw_parts_mut(self.whole.ptr.as_ptr().add(self.range.start), self.range.len())
        }
    }
}

/// A slab whose regions are being filled.
pub struct Split(Arc<Slab>);

impl Split {
    /// The slab, once every region has been dropped.
    pub fn join(self) -> Result<Slab> {
        Arc::into_inner(self.0).ok_or_else(|| Error::run("a buffer is still being read into"))
    }
}

impl Slab {
    /// Splits off regions, in ascending order and without overlap, that several readers fill at the same time.
    pub fn split(self, ranges: impl Iterator<Item = Range<usize>>) -> Result<(Vec<Region>, Split)> {
        let whole = Arc::new(self);
        let mut regions = Vec::new();
        let mut end = 0;
        for range in ranges {
            if range.start < end || range.end < range.start || range.end > whole.len {
                return Err(Error::run("regions of a buffer overlap or do not fit it"));
            }
            end = range.end;
            regions.push(Region { whole: whole.clone(), range });
        }
        Ok((regions, Split(whole)))
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(pool) = self.home.take().and_then(|h| h.upgrade()) {
            pool.give_back(Slab { ptr: self.ptr, len: self.len, home: None });
            return;
        }
        // SAFETY: the mapping was made in `new` with this address and length and is unmapped once.
        if let Err(e) = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) } {
            log::warn!("cannot unmap {} bytes: {e}", self.len);
        }
    }
}

/// At most `capacity` slabs of one size, made when first needed and kept for reuse.
pub struct SlabPool {
    size: usize,
    capacity: usize,
    state: Mutex<PoolState>,
    returned: Condvar,
}

#[derive(Default)]
struct PoolState {
    free: Vec<Slab>,
    made: usize,
}

impl SlabPool {
    /// A pool of up to `capacity` slabs of `size` bytes; none is made yet.
    pub fn new(size: usize, capacity: usize) -> Arc<SlabPool> {
        Arc::new(SlabPool { size, capacity, state: Mutex::default(), returned: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, slab: Slab) {
        self.lock().free.push(slab);
        self.returned.notify_one();
    }

    fn adopt(self: &Arc<Self>, mut slab: Slab) -> Slab {
        slab.home = Some(Arc::downgrade(self));
        slab
    }

    /// A slab if one is free or may still be made; its contents are unspecified.
    pub fn try_take(self: &Arc<Self>) -> Result<Option<Slab>> {
        let mut state = self.lock();
        if let Some(slab) = state.free.pop() {
            return Ok(Some(self.adopt(slab)));
        }
        if state.made == self.capacity {
            return Ok(None);
        }
        let slab = Slab::new(self.size)?;
        state.made += 1;
        Ok(Some(self.adopt(slab)))
    }

    /// Waits for a slab; gives up with an interruption once `cancelled` says so (asked every 50 ms).
    pub fn take(self: &Arc<Self>, cancelled: &dyn Fn() -> bool) -> Result<Slab> {
        loop {
            if let Some(slab) = self.try_take()? {
                return Ok(slab);
            }
            if cancelled() {
                return Err(Error::interrupted());
            }
            let state = self.lock();
            if state.free.is_empty() {
                let wait = self.returned.wait_timeout(state, Duration::from_millis(50));
                drop(wait);
            }
        }
    }

    /// Slabs the pool may hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> usize {
        self.size
    }

    /// Slabs made so far; never more than the capacity.
    pub fn made(&self) -> usize {
        self.lock().made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_reuses_and_never_exceeds_its_capacity() -> Result<()> {
        let pool = SlabPool::new(100, 2);
        let a = Arc::new(pool.take(&|| false)?);
        let _b = pool.take(&|| false)?;
        assert!(pool.try_take()?.is_none());
        let reader = a.clone();
        drop(a);
        assert!(pool.try_take()?.is_none(), "a slab somebody still reads is not free");
        drop(reader);
        assert!(pool.try_take()?.is_some());
        assert_eq!(pool.made(), 2);
        Ok(())
    }

    #[test]
    fn waiting_for_a_slab_can_be_cancelled() -> Result<()> {
        let pool = SlabPool::new(100, 1);
        let _held = pool.take(&|| false)?;
        assert_eq!(pool.take(&|| true).err().map(|e| e.kind()), Some(crate::Kind::Interrupted));
        Ok(())
    }

    #[test]
    fn regions_are_filled_apart_and_join() -> Result<()> {
        let (mut regions, split) = Slab::new(8192)?.split([0..4096, 4096..8192].into_iter())?;
        regions[1].bytes_mut()[0] = 9;
        regions.truncate(1);
        let held = Slab::new(8192)?.split(std::iter::once(0..4096))?;
        assert!(held.1.join().is_err(), "a region is still out");
        regions.clear();
        assert_eq!(split.join()?.bytes()[4096], 9);
        assert!(Slab::new(8192)?.split([0..4097, 4096..8192].into_iter()).is_err());
        assert!(Slab::new(8192)?.split(std::iter::once(0..8193)).is_err());
        Ok(())
    }

    #[test]
    fn zeroed_aligned_and_rounded_up() -> Result<()> {
        let mut s = Slab::new(5000)?;
        assert_eq!((s.len(), s.bytes().as_ptr() as usize % PAGE), (8192, 0));
        assert!(s.bytes().iter().all(|b| *b == 0));
        s.bytes_mut()[8191] = 7;
        assert_eq!(s.bytes()[8191], 7);
        assert_eq!(Slab::new(0)?.len(), PAGE);
        Ok(())
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        let e = Slab::new(usize::MAX - 10).err().map(|e| e.kind());
        assert_eq!(e, Some(crate::Kind::Machine));
    }
}
