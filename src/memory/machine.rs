//! What the machine has: memory that is really free, cores, and what this process holds.

use std::fs;

/// Memory of the machine and of the control group the process runs in, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Installed.
    pub total: u64,
    /// Free for a new allocation without swapping, the tighter of machine and control group.
    pub available: u64,
    /// The control group's limit, if it has one.
    pub cgroup_limit: Option<u64>,
}

/// The value of `key` in a `/proc` file of `key:  n kB` lines, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|k| k * 1024)
}

/// Limit and current use of the control group named in `/proc/self/cgroup`, version 2 or 1, its ancestors included.
fn cgroup() -> Option<(u64, u64)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let number = |path: &str| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let mut tightest: Option<(u64, u64)> = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next(), parts.next()?, parts.next()?);
        let (root, limit_file, used_file) = if controllers.is_empty() {
            ("/sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers.split(',').any(|c| c == "memory") {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        let mut at = path.trim_end_matches('/');
        loop {
            let limit = number(&format!("{root}{at}/{limit_file}"));
            let used = number(&format!("{root}{at}/{used_file}")).unwrap_or(0);
            // Version 1 writes "no limit" as a number near the top of the range.
            if let Some(limit) = limit.filter(|l| *l < 1 << 60) {
                let free = |(l, u): (u64, u64)| l.saturating_sub(u);
                if tightest.is_none_or(|t| free((limit, used)) < free(t)) {
                    tightest = Some((limit, used));
                }
            }
            match at.rfind('/') {
                Some(i) => at = &at[..i],
                None => break,
            }
        }
    }
    tightest
}

/// Reads `/proc/meminfo` and the control group. `None` where the system has no such files.
pub fn memory() -> Option<Memory> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let total = kilobytes(&text, "MemTotal")?;
    let free = kilobytes(&text, "MemAvailable")?;
    let group = cgroup();
    let available = group.map_or(free, |(limit, used)| free.min(limit.saturating_sub(used)));
    Some(Memory { total, available, cgroup_limit: group.map(|(limit, _)| limit) })
}

/// Memory this process holds for itself now, `RssAnon + RssShmem`: pages of mapped files are not counted.
pub fn resident() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kilobytes(&text, "RssAnon").unwrap_or(0) + kilobytes(&text, "RssShmem").unwrap_or(0)
}

/// Compute threads by default: physical cores, no more than the processors this process may use.
pub fn default_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut cores = std::collections::HashSet::new();
    let mut package = "";
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        match key.trim() {
            "physical id" => package = value.trim(),
            "core id" => {
                cores.insert((package, value.trim()));
            }
            _ => {}
        }
    }
    if cores.is_empty() { usable } else { usable.min(cores.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_spelling() {
        let text = "MemTotal:       24689520 kB\nMemAvailable:    1 kB\n";
        assert_eq!(kilobytes(text, "MemTotal"), Some(24_689_520 * 1024));
        assert_eq!(kilobytes(text, "MemAvailable"), Some(1024));
        assert_eq!(kilobytes(text, "Mem"), None);
    }

    #[test]
    fn this_machine_has_memory_and_a_core() {
        let m = memory();
        assert!(m.is_some_and(|m| m.available > 0 && m.available <= m.total), "{m:?}");
        assert!(resident() > 0);
        assert!(default_threads() >= 1);
    }
}
