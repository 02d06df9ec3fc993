//! The threads that read: demanded reads first, then what is read ahead, then guesses.

use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How soon a read is needed. Reads of one kind start in the order in which they were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// The computation waits for it.
    Demand,
    /// The computation will need it.
    Ahead,
    /// The computation may need it.
    Guess,
}

/// Kinds of [`Priority`].
const KINDS: usize = 3;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    waiting: [VecDeque<Job>; KINDS],
    running: [usize; KINDS],
    closed: bool,
    busy_since: Option<Instant>,
    busy: Duration,
}

impl Queue {
    /// The next job that may start: guesses only while nothing else is read, one at a time, so that a demanded read
    /// never waits for more than one of them.
    fn next(&mut self) -> Option<(usize, Job)> {
        for kind in 0..KINDS {
            let guess = kind == Priority::Guess as usize;
            if guess && self.running.iter().any(|n| *n > 0) {
                return None;
            }
            if let Some(job) = self.waiting[kind].pop_front() {
                return Some((kind, job));
            }
        }
        None
    }

    fn started(&mut self, kind: usize) {
        if self.running.iter().all(|n| *n == 0) {
            self.busy_since = Some(Instant::now());
        }
        self.running[kind] += 1;
    }

    fn ended(&mut self, kind: usize) {
        self.running[kind] -= 1;
        if self.running.iter().all(|n| *n == 0)
            && let Some(since) = self.busy_since.take()
        {
            self.busy += since.elapsed();
        }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some((kind, job)) = queue.next() {
                queue.started(kind);
                drop(queue);
                job();
                queue = self.lock();
                queue.ended(kind);
                // A guess may start now that was held back.
                self.changed.notify_one();
            } else if queue.closed {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// A fixed number of reader threads, which is the number of reads in flight.
///
/// Dropping the pool ends the threads after the reads they are in; it does not wait for them, so that a drive that
/// hangs cannot hold the program.
pub struct IoPool {
    shared: Arc<Shared>,
    depth: usize,
}

impl IoPool {
    /// Starts `depth` threads.
    pub fn new(depth: usize) -> Result<Arc<IoPool>> {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new() });
        let pool = IoPool { shared, depth: depth.max(1) };
        for i in 0..pool.depth {
            let shared = pool.shared.clone();
            std::thread::Builder::new()
                .name(format!("read-{i}"))
                .spawn(move || shared.work())
                .map_err(|e| Error::machine("cannot start the reader threads").cause(e))?;
        }
        Ok(Arc::new(pool))
    }

    /// Reads in flight at most.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Queues a read.
    pub fn submit(&self, priority: Priority, job: impl FnOnce() + Send + 'static) {
        self.shared.lock().waiting[priority as usize].push_back(Box::new(job));
        self.shared.changed.notify_one();
    }

    /// Forgets the guesses that have not started.
    pub fn drop_guesses(&self) {
        let dropped = std::mem::take(&mut self.shared.lock().waiting[Priority::Guess as usize]);
        drop(dropped);
    }

    /// Time in which at least one read was in flight.
    pub fn busy(&self) -> Duration {
        let queue = self.shared.lock();
        queue.busy + queue.busy_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Drop for IoPool {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        // What nobody waits for any more need not be read.
        let dropped = std::mem::take(&mut queue.waiting);
        drop(queue);
        drop(dropped);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn demands_overtake_and_guesses_wait_for_an_idle_drive() -> Result<()> {
        let pool = IoPool::new(1)?;
        let (hold, held) = channel::<()>();
        let (tell, told) = channel();
        pool.submit(Priority::Ahead, move || {
            let _ = held.recv();
        });
        for (priority, name) in
            [(Priority::Guess, "guess"), (Priority::Ahead, "ahead"), (Priority::Demand, "demand")]
        {
            let tell = tell.clone();
            pool.submit(priority, move || {
                let _ = tell.send(name);
            });
        }
        drop(hold);
        drop(tell);
        assert_eq!(told.iter().collect::<Vec<_>>(), ["demand", "ahead", "guess"]);
        assert!(pool.busy() > Duration::ZERO);
        Ok(())
    }

    #[test]
    fn a_hanging_read_does_not_hold_the_program() -> Result<()> {
        let pool = IoPool::new(2)?;
        let (_hold, held) = channel::<()>();
        let (tell, told) = channel();
        pool.submit(Priority::Demand, move || {
            let _ = tell.send(());
            let _ = held.recv();
        });
        assert!(told.recv().is_ok());
        drop(pool);
        Ok(())
    }
}
