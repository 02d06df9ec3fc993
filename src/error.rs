//! Errors that say what went wrong, where, and what to do: the exit code follows from the kind.

use std::fmt;
use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What sort of failure it is; fixes the exit code (see [`Kind::exit_code`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A flag or argument that cannot be acted on. Exit 2.
    Usage,
    /// The checkpoint (or a session file) is refused before any work. Exit 3.
    Refused,
    /// The machine is refused before the run: does not fit, no such adapter. Exit 4.
    Machine,
    /// A read or write failed. Exit 1.
    Io,
    /// A logit or an intermediate value is not finite. Exit 1.
    NonFinite,
    /// The device was lost or reported an error in mid-run. Exit 1.
    Device,
    /// Any other failure of a run. Exit 1.
    Run,
    /// Stopped by the user. Exit 130.
    Interrupted,
    /// The reader of our output went away. Not an error for the user: exit 0.
    ClosedPipe,
}

impl Kind {
    /// The process exit code of the command-line contract.
    pub fn exit_code(self) -> u8 {
        match self {
            Kind::ClosedPipe => 0,
            Kind::Io | Kind::NonFinite | Kind::Device | Kind::Run => 1,
            Kind::Usage => 2,
            Kind::Refused => 3,
            Kind::Machine => 4,
            Kind::Interrupted => 130,
        }
    }
}

/// Where it went wrong. Every part is optional; those present are printed in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// The file concerned.
    pub file: Option<PathBuf>,
    /// The tensor, in the released spelling.
    pub tensor: Option<String>,
    /// The configuration key, dotted (`text_config.hidden_size`).
    pub key: Option<String>,
    /// Byte offset in the file.
    pub offset: Option<u64>,
    /// Bytes asked for.
    pub bytes: Option<u64>,
    /// The device or adapter.
    pub device: Option<String>,
    /// Zero-based layer.
    pub layer: Option<usize>,
    /// Zero-based position in the sequence.
    pub position: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sep = "";
        let mut part = |f: &mut fmt::Formatter<'_>, text: fmt::Arguments<'_>| {
            let r = write!(f, "{sep}{text}");
            sep = ", ";
            r
        };
        if let Some(p) = &self.file {
            part(f, format_args!("{}", p.display()))?;
        }
        if let Some(t) = &self.tensor {
            part(f, format_args!("tensor {t}"))?;
        }
        if let Some(k) = &self.key {
            part(f, format_args!("key {k}"))?;
        }
        if let Some(l) = self.layer {
            part(f, format_args!("layer {l}"))?;
        }
        if let Some(p) = self.position {
            part(f, format_args!("position {p}"))?;
        }
        if let Some(o) = self.offset {
            part(f, format_args!("offset {o}"))?;
        }
        if let Some(b) = self.bytes {
            part(f, format_args!("{b} bytes"))?;
        }
        if let Some(d) = &self.device {
            part(f, format_args!("device {d}"))?;
        }
        Ok(())
    }
}

/// One failure: `error: <what> (<where>): <cause>` and, where there is one, `hint: <what to do>`.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: Kind,
    what: String,
    place: Place,
    cause: Option<String>,
    hint: Option<String>,
}

impl Error {
    /// An error of `kind` that says `what` failed, in one clause and without a full stop.
    pub fn new(kind: Kind, what: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, what: what.into(), place: Place::default(), cause: None, hint: None }))
    }
    /// Bad usage (exit 2).
    pub fn usage(what: impl Into<String>) -> Error {
        Error::new(Kind::Usage, what)
    }
    /// The checkpoint is refused (exit 3).
    pub fn refused(what: impl Into<String>) -> Error {
        Error::new(Kind::Refused, what)
    }
    /// The machine is refused (exit 4).
    pub fn machine(what: impl Into<String>) -> Error {
        Error::new(Kind::Machine, what)
    }
    /// The run failed (exit 1).
    pub fn run(what: impl Into<String>) -> Error {
        Error::new(Kind::Run, what)
    }
    /// A failed read or write (exit 1) with the system's own words as the cause.
    pub fn io(what: impl Into<String>, cause: std::io::Error) -> Error {
        let kind = if cause.kind() == std::io::ErrorKind::BrokenPipe { Kind::ClosedPipe } else { Kind::Io };
        Error::new(kind, what).cause(cause)
    }
    /// The user stopped the run (exit 130).
    pub fn interrupted() -> Error {
        Error::new(Kind::Interrupted, "interrupted")
    }

    /// Names the file.
    pub fn file(mut self, path: impl AsRef<Path>) -> Error {
        self.0.place.file = Some(path.as_ref().to_path_buf());
        self
    }
    /// Names the tensor.
    pub fn tensor(mut self, name: impl Into<String>) -> Error {
        self.0.place.tensor = Some(name.into());
        self
    }
    /// Names the configuration key.
    pub fn key(mut self, key: impl Into<String>) -> Error {
        self.0.place.key = Some(key.into());
        self
    }
    /// Names the byte range.
    pub fn range(mut self, offset: u64, bytes: u64) -> Error {
        self.0.place.offset = Some(offset);
        self.0.place.bytes = Some(bytes);
        self
    }
    /// Names the device.
    pub fn device(mut self, device: impl Into<String>) -> Error {
        self.0.place.device = Some(device.into());
        self
    }
    /// Names the layer.
    pub fn layer(mut self, layer: usize) -> Error {
        self.0.place.layer = Some(layer);
        self
    }
    /// Names the position in the sequence.
    pub fn position(mut self, position: usize) -> Error {
        self.0.place.position = Some(position);
        self
    }
    /// The cause, appended after a colon.
    pub fn cause(mut self, cause: impl fmt::Display) -> Error {
        self.0.cause = Some(cause.to_string());
        self
    }
    /// `expected …, found …` as the cause.
    pub fn expected(self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        self.cause(format_args!("expected {expected}, found {found}"))
    }
    /// What the user can do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.0.hint = Some(hint.into());
        self
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }
    /// The place, as far as known.
    pub fn place(&self) -> &Place {
        &self.0.place
    }
    /// The hint, if there is one.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        if self.0.place != Place::default() {
            write!(f, " ({})", self.0.place)?;
        }
        if let Some(c) = &self.0.cause {
            write!(f, ": {c}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_with_place_and_cause() {
        let e =
            Error::refused("shard is too short").file("a/b.safetensors").tensor("x.weight").expected(10, 9);
        assert_eq!(
            e.to_string(),
            "shard is too short (a/b.safetensors, tensor x.weight): expected 10, found 9"
        );
        assert_eq!(e.kind().exit_code(), 3);
    }

    #[test]
    fn a_closed_pipe_is_not_a_failure() {
        let e = Error::io("cannot write", std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(e.kind().exit_code(), 0);
    }
}
