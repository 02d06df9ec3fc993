//! Tells the user, from the first second on, what is being done and how fast.

use super::counters::Counters;
use crate::memory::machine;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often resident memory is sampled for the peak.
const SAMPLE: Duration = Duration::from_millis(100);
/// How often a line is written where there is no terminal.
const LINE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Shared {
    phase: Mutex<String>,
    done: AtomicUsize,
    of: AtomicUsize,
    bytes: AtomicU64,
    stop: AtomicBool,
    peak: AtomicU64,
    counters: Mutex<Option<Arc<Counters>>>,
}

/// A status line on a terminal, a line a second elsewhere; also watches the peak of resident memory.
pub struct Progress {
    shared: Arc<Shared>,
    bar: Option<ProgressBar>,
    thread: Option<JoinHandle<()>>,
    quiet: bool,
}

/// `n` bytes for people: powers of ten, as drives and the budgets count.
pub fn human(n: u64) -> String {
    let mut value = n as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 999.5 {
            return if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1000.0;
    }
    format!("{value:.2} TB")
}

impl Shared {
    fn text(&self, seconds: f64, before: u64) -> (String, u64) {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (bytes, what) = match self.counters.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(c) => (c.nvme_bytes.get(), "read"),
            None => (self.bytes.load(Ordering::Relaxed), "done"),
        };
        let of = self.of.load(Ordering::Relaxed);
        let layer = match of {
            0 => String::new(),
            n => format!(", layer {}/{n}", (self.done.load(Ordering::Relaxed) + 1).min(n)),
        };
        let rate = bytes.saturating_sub(before) as f64 / seconds.max(1e-3);
        (format!("{phase}{layer}, {} {what}, {}/s", human(bytes), human(rate as u64)), bytes)
    }
}

impl Progress {
    /// Starts reporting to stderr, unless `quiet`.
    pub fn start(quiet: bool) -> Progress {
        let shared = Arc::new(Shared { phase: Mutex::new("starting".into()), ..Shared::default() });
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !quiet).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
                bar.set_style(style);
            }
            bar
        });
        let (for_thread, bar_for_thread) = (shared.clone(), bar.clone());
        let watch = move || {
            let mut last = Instant::now();
            let mut before = 0;
            while !for_thread.stop.load(Ordering::Relaxed) {
                std::thread::park_timeout(SAMPLE);
                for_thread.peak.fetch_max(machine::resident(), Ordering::Relaxed);
                let elapsed = last.elapsed();
                if quiet || (bar_for_thread.is_none() && elapsed < LINE) {
                    continue;
                }
                let (text, bytes) = for_thread.text(elapsed.as_secs_f64(), before);
                match &bar_for_thread {
                    Some(bar) => {
                        bar.set_message(text);
                        bar.tick();
                        if elapsed < LINE {
                            continue;
                        }
                    }
                    None => eprintln!("{text}"),
                }
                before = bytes;
                last = Instant::now();
            }
        };
        let thread = match std::thread::Builder::new().name("progress".into()).spawn(watch) {
            Ok(t) => Some(t),
            Err(e) => {
                log::warn!("no progress thread: {e}");
                None
            }
        };
        Progress { shared, bar, thread, quiet }
    }

    /// Names what is being done now.
    pub fn phase(&self, text: impl Into<String>) {
        *self.shared.phase.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
        self.shared.of.store(0, Ordering::Relaxed);
    }

    /// Counts the reads of a model.
    pub fn watch(&self, counters: Arc<Counters>) {
        *self.shared.counters.lock().unwrap_or_else(PoisonError::into_inner) = Some(counters);
    }

    /// Layer `i` (zero-based) of `n` is at work.
    pub fn layer(&self, i: usize, n: usize) {
        self.shared.done.store(i, Ordering::Relaxed);
        self.shared.of.store(n, Ordering::Relaxed);
    }

    /// Sets the bytes done, where no model counts them.
    pub fn bytes(&self, n: u64) {
        self.shared.bytes.store(n, Ordering::Relaxed);
    }

    /// Says one line on stderr, above the status line; nothing when quiet.
    pub fn say(&self, line: &str) {
        if !self.quiet {
            self.suspend(|| eprintln!("{line}"));
        }
    }

    /// Runs `f`, which writes to the terminal, with the status line out of the way.
    pub fn suspend<R>(&self, f: impl FnOnce() -> R) -> R {
        match &self.bar {
            Some(bar) => bar.suspend(f),
            None => f(),
        }
    }

    /// The most resident memory seen so far, in bytes (`RssAnon + RssShmem`).
    pub fn peak(&self) -> u64 {
        self.shared.peak.fetch_max(machine::resident(), Ordering::Relaxed);
        self.shared.peak.load(Ordering::Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                log::warn!("the progress thread ended early");
            }
        }
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl crate::model::Observer for &Progress {
    fn layer(&mut self, i: usize, n: usize) {
        Progress::layer(self, i, n);
    }
}

#[cfg(test)]
mod tests {
    use super::human;

    #[test]
    fn sizes_for_people() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(999), "999 B");
        assert_eq!(human(1_000), "1.0 kB");
        assert_eq!(human(17_547_264), "17.5 MB");
        assert_eq!(human(1_560_860_324_864), "1.56 TB");
    }
}
