//! What the machine can give: memory within the cgroup's limits, processors, and sizes as people write them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::StreamError;

/// Memory that could be taken now without pushing anything out that is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Bytes to spare.
    pub bytes: u64,
    /// Bytes there are: the machine's or the smallest limit's.
    pub total_bytes: u64,
    /// What said so, for people.
    pub source: String,
}

/// Asks the system, and on Linux every cgroup from the process's own up to the root.
#[must_use]
pub fn available_memory() -> AvailableMemory {
    #[cfg(target_os = "linux")]
    let memory = linux_memory(Path::new("/"));
    #[cfg(not(target_os = "linux"))]
    let memory = mac_memory();
    memory.unwrap_or(AvailableMemory { bytes: 4 << 30, total_bytes: 4 << 30, source: "a guess".into() })
}

/// Processors that this process may use: affinity and CPU quota included.
#[must_use]
pub fn usable_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Resident set of this process.
#[must_use]
pub fn process_rss_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Largest resident set of this process so far.
#[must_use]
pub fn peak_rss_bytes() -> Option<u64> {
    #[cfg(target_os = "macos")]
    {
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).ok()?;
        u64::try_from(usage.max_rss()).ok()
    }
    #[cfg(not(target_os = "macos"))]
    status_bytes("VmHWM:")
}

fn status_bytes(key: &str) -> Option<u64> {
    kibibytes_of(&fs::read_to_string("/proc/self/status").ok()?, key)
}

/// The number after `key` in `/proc`'s tables, in bytes.
fn kibibytes_of(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// `MemAvailable` and every cgroup limit, the smallest first; `root` is the file system's root, another one in tests.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn linux_memory(root: &Path) -> Option<AvailableMemory> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let system = AvailableMemory {
        bytes: kibibytes_of(&meminfo, "MemAvailable:")?,
        total_bytes: kibibytes_of(&meminfo, "MemTotal:")?,
        source: "available memory".into(),
    };
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().filter_map(|line| cgroup_memory(root, line));
    std::iter::once(system).chain(limits).min_by_key(|memory| memory.bytes)
}

/// File names of a cgroup version's memory controller.
struct Controller {
    mount: &'static str,
    /// Each is a limit; the smallest counts.
    limits: &'static [&'static str],
    usage: &'static str,
    /// Line of `memory.stat` that counts page cache which can go at once.
    reclaimable: &'static str,
}

const CGROUP_V2: Controller = Controller {
    mount: "sys/fs/cgroup",
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: "inactive_file",
};
const CGROUP_V1: Controller = Controller {
    mount: "sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// The tightest of a cgroup and its ancestors, for a line of `/proc/self/cgroup`.
fn cgroup_memory(root: &Path, line: &str) -> Option<AvailableMemory> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let controller = match controllers {
        "" => CGROUP_V2,
        names if names.split(',').any(|name| name == "memory") => CGROUP_V1,
        _ => return None,
    };
    let mount = root.join(controller.mount);
    // In a container the path may be the host's, of which only the end or nothing is mounted; the mount itself is then
    // the group.
    let mut folder: PathBuf = mount.join(path.trim_start_matches('/'));
    let mut tightest: Option<AvailableMemory> = None;
    loop {
        if let Some(memory) = group_memory(&folder, &controller)
            && tightest.as_ref().is_none_or(|tightest| memory.bytes < tightest.bytes)
        {
            tightest = Some(memory);
        }
        if folder == mount || !folder.pop() || !folder.starts_with(&mount) {
            return tightest;
        }
    }
}

/// What one cgroup leaves; none without a limit.
fn group_memory(folder: &Path, controller: &Controller) -> Option<AvailableMemory> {
    /// Limits of this size and more are version 1's way to say that there is none.
    const UNLIMITED_BYTES: u64 = 1 << 60;
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, name) = controller
        .limits
        .iter()
        .filter_map(|name| Some((number(name)?, name)))
        .filter(|(limit, _)| *limit < UNLIMITED_BYTES)
        .min()?;
    let used = number(controller.usage).unwrap_or(0);
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == controller.reclaimable)
        .and_then(|(_, value)| value.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(AvailableMemory {
        bytes: limit.saturating_sub(used.saturating_sub(reclaimable)),
        total_bytes: limit,
        source: format!("the cgroup's {name}"),
    })
}

/// macOS tells by commands what Linux tells by files.
#[cfg(not(target_os = "linux"))]
fn mac_memory() -> Option<AvailableMemory> {
    let output = |program: &str, args: &[&str]| -> Option<String> {
        let output = std::process::Command::new(program).args(args).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let total_bytes = output("/usr/sbin/sysctl", &["-n", "hw.memsize"])?.trim().parse().ok()?;
    let bytes = vm_stat_bytes(&output("/usr/bin/vm_stat", &[])?)?;
    Some(AvailableMemory { bytes, total_bytes, source: "available memory".into() })
}

/// Pages that `vm_stat` counts as free or as quickly freed, in bytes.
#[cfg_attr(target_os = "linux", allow(dead_code))]
fn vm_stat_bytes(text: &str) -> Option<u64> {
    let page_bytes: u64 = text.split("page size of ").nth(1)?.split(' ').next()?.parse().ok()?;
    let pages = |key: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|rest| rest.trim().trim_end_matches('.').parse().ok()).unwrap_or(0)
    };
    let keys = ["Pages free:", "Pages inactive:", "Pages speculative:", "Pages purgeable:"];
    keys.map(pages).iter().sum::<u64>().checked_mul(page_bytes)
}

/// Units by name, in bytes; all are powers of 1024, as memory is.
const UNITS: [(&str, u64); 5] = [("", 1), ("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30), ("T", 1 << 40)];

/// Reads `512M`, `8G`, `1.5GiB`, `1048576`.
///
/// # Errors
/// [`StreamError::Size`].
pub fn parse_size(text: &str) -> Result<u64, StreamError> {
    let error = |reason| StreamError::Size { text: text.to_owned(), reason };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit);
    let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(|| error("unknown unit"))?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(*scale).ok_or_else(|| error("too large"));
    }
    let number: f64 = number.parse().map_err(|_| error("no number"))?;
    let bytes = number * *scale as f64;
    if bytes < 9e18 { Ok(bytes as u64) } else { Err(error("too large")) }
}

/// Writes a size with three significant digits and a binary unit.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    let mut unit = UNITS.len() - 1;
    while unit > 0 && bytes < UNITS[unit].1 {
        unit -= 1;
    }
    let (name, scale) = UNITS[unit];
    let value = bytes as f64 / scale as f64;
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {name}iB"),
        _ if value < 100.0 => format!("{value:.1} {name}iB"),
        _ => format!("{value:.0} {name}iB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            "proc/meminfo",
            "MemTotal:       16384000 kB\nMemFree: 1 kB\nMemAvailable:    8192000 kB\n",
        );
        root
    }

    #[test]
    fn without_limits_the_machine_decides() {
        let root = machine();
        write(root.path(), "proc/self/cgroup", "0::/user.slice\n");
        write(root.path(), "sys/fs/cgroup/user.slice/memory.max", "max\n");
        let memory = linux_memory(root.path()).unwrap();
        assert_eq!((memory.bytes, memory.total_bytes), (8_192_000 << 10, 16_384_000 << 10));
        assert_eq!(memory.source, "available memory");
    }

    #[test]
    fn the_tightest_ancestor_decides_and_page_cache_does_not_count() {
        let root = machine();
        write(root.path(), "proc/self/cgroup", "0::/a/b\n");
        write(root.path(), "sys/fs/cgroup/a/b/memory.max", "6000000000\n");
        write(root.path(), "sys/fs/cgroup/a/b/memory.current", "1000\n");
        write(root.path(), "sys/fs/cgroup/a/memory.max", "max\n");
        write(root.path(), "sys/fs/cgroup/a/memory.high", "4000000000\n");
        write(root.path(), "sys/fs/cgroup/a/memory.current", "3000000000\n");
        write(root.path(), "sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 2000000000\nfile 9\n");
        let memory = linux_memory(root.path()).unwrap();
        assert_eq!((memory.bytes, memory.total_bytes), (3_000_000_000, 4_000_000_000));
        assert_eq!(memory.source, "the cgroup's memory.high");
    }

    #[test]
    fn version_1_and_paths_outside_the_container_are_understood() {
        let root = machine();
        write(root.path(), "proc/self/cgroup", "9:cpu:/x\n4:memory,hugetlb:/docker/0123\n");
        write(root.path(), "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000000\n");
        write(root.path(), "sys/fs/cgroup/memory/memory.usage_in_bytes", "300000000\n");
        write(root.path(), "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100000000\n");
        assert_eq!(linux_memory(root.path()).unwrap().bytes, 800_000_000);
        write(root.path(), "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(linux_memory(root.path()).unwrap().source, "available memory");
    }

    #[test]
    fn nonsense_in_the_tables_is_no_limit() {
        let root = machine();
        write(root.path(), "proc/self/cgroup", "no colons\n0::\n0::/../../..\n");
        write(root.path(), "sys/fs/cgroup/memory.max", "-5\n");
        assert_eq!(linux_memory(root.path()).unwrap().source, "available memory");
    }

    #[test]
    fn this_machine_says_something() {
        let memory = available_memory();
        assert!(memory.bytes > 0 && memory.bytes <= memory.total_bytes, "{memory:?}");
        assert!(usable_cpus() > 0);
        #[cfg(target_os = "linux")]
        assert!(process_rss_bytes().unwrap() <= peak_rss_bytes().unwrap() + (1 << 20));
    }

    #[test]
    fn vm_stat_is_understood() {
        let text = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:      100.\n\
                    Pages active:    9000.\nPages inactive:  50.\nPages speculative: 7.\nPages purgeable: 3.\n";
        assert_eq!(vm_stat_bytes(text), Some(160 * 16384));
        assert_eq!(vm_stat_bytes(""), None);
    }

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("512M", 512 << 20),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("1.5GiB", 3 << 29),
            ("16 KiB", 16 << 10),
            ("2TB", 2 << 40),
            ("10B", 10),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "G", "-1G", "1.2.3M", "1X", "1e3", "99999999999T", "nan", ".", "1 2"] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains("is not a size"), "{error}");
        }
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"), (8 << 30, "8.00 GiB")]
        {
            assert_eq!(format_size(bytes), text);
        }
        assert_eq!(format_size(u64::MAX), "16777216 TiB");
    }
}
