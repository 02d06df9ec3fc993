//! Positional reads that cannot come back short without an error.

use crate::error::{Error, Result};
use std::fs::File;
use std::io;
use std::path::Path;

/// What regions are aligned to, in the file and in memory.
pub const SECTOR: usize = 4096;

/// Where in its region a run begins, whatever the engine.
pub fn lead(offset: u64) -> usize {
    (offset % SECTOR as u64) as usize
}

/// Bytes of the region that a run of `len` bytes at file offset `offset` is read into: its first and last sector whole.
pub fn region_bytes(offset: u64, len: usize) -> usize {
    (lead(offset) + len).next_multiple_of(SECTOR)
}

/// Reads a run into `region` (page-aligned, [`region_bytes`] long or longer), so that it lies at `region[lead(offset)..]`.
pub fn read_run(reader: &dyn ReadAt, path: &Path, region: &mut [u8], offset: u64, len: usize) -> Result<()> {
    let at = lead(offset);
    let buf = region
        .get_mut(at..at + len)
        .ok_or_else(|| Error::run("a buffer is too small for its read").file(path))?;
    read_exact_at(reader, path, buf, offset)
}

/// One open file (or a range of memory standing for one) that can be read at any offset.
///
/// A read may return fewer bytes than asked for; [`read_exact_at`] loops. Implementations: a file
/// through `pread`, the embedded demo, and the failing readers of the tests.
pub trait ReadAt: Send + Sync {
    /// What address, offset and length of a read must be multiples of; 1 where anything will do. Never more than
    /// [`SECTOR`].
    fn alignment(&self) -> usize {
        1
    }

    /// Reads up to `buf.len()` bytes at `offset`; 0 means the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buf, offset)
    }
}

impl ReadAt for &'static [u8] {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|o| self.get(o..)).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

/// The most that one system call is asked for: some systems refuse 2 GiB and more, others return short.
const MAX_CALL: usize = 1 << 30;

/// Fills `buf` from `offset`, looping over short reads and interruptions.
///
/// Fails with file, offset and length when the system reports an error or the file ends too early.
pub fn read_exact_at(reader: &dyn ReadAt, path: &Path, buf: &mut [u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let end = buf.len().min(done + MAX_CALL);
        match reader.read_at(&mut buf[done..end], offset + done as u64) {
            Ok(0) => {
                return Err(Error::new(crate::error::Kind::Io, "file ends too early")
                    .file(path)
                    .range(offset, buf.len() as u64)
                    .cause(format_args!("only {done} bytes could be read")));
            }
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => {
                return Err(Error::io("cannot read", e).file(path).range(offset, buf.len() as u64));
            }
        }
    }
    Ok(())
}
