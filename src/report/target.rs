//! Where a result file goes: written beside its place, and renamed over it when whole.

use crate::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// The file that `path` names, links resolved. Refuses what a rename must not replace: a device, a pipe, a folder; and a
/// place in a folder that is not there.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let fail = |what: &str, e: std::io::Error| Error::new(Kind::Io, what).file(path).cause(e);
    match std::fs::metadata(path) {
        Ok(m) if m.is_file() => path.canonicalize().map_err(|e| fail("cannot resolve the file to write", e)),
        Ok(_) => Err(Error::new(Kind::Io, "the file to write is no regular file").file(path)),
        // A link to a file that is not there yet would be replaced, not followed.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !path.is_symlink() => {
            let folder = folder(path);
            match std::fs::metadata(folder) {
                Ok(m) if m.is_dir() => Ok(path.to_path_buf()),
                Ok(_) => Err(Error::new(Kind::Io, "the file to write lies in no folder").file(path)),
                Err(e) => Err(fail("the folder of the file to write cannot be opened", e)),
            }
        }
        Err(e) => Err(fail("cannot inspect the file to write", e)),
    }
}

/// The folder a file lies in.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An unfinished file beside `target`, with the permissions of an ordinary new file.
pub fn unfinished(target: &Path, prefix: &str) -> std::io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix(prefix)
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_and_new_ones_are_targets() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("file");
        std::fs::write(&file, b"x")?;
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link)?;
        assert_eq!(resolve(&link).ok(), Some(file.canonicalize()?));
        assert_eq!(resolve(&dir.path().join("new")).ok(), Some(dir.path().join("new")));
        for bad in [Path::new("/dev/null"), dir.path(), &dir.path().join("none/new"), &file.join("new")] {
            assert_eq!(resolve(bad).err().map(|e| e.kind()), Some(Kind::Io), "{}", bad.display());
        }
        Ok(())
    }
}
