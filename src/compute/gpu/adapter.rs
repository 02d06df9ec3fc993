//! Which adapters there are, and which one to use.

use crate::error::{Error, Result};
use std::fmt;

/// What an adapter is, as its driver says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterKind {
    /// A card with its own memory.
    Discrete,
    /// Shares the host's memory.
    Integrated,
    /// A card handed to a virtual machine.
    Virtual,
    /// The driver does not say.
    Other,
    /// A software renderer (lavapipe, SwiftShader, WARP): for tests, taken only when allowed.
    Software,
}

impl AdapterKind {
    /// Whether the adapter's memory is the host's memory, so that budgets share one pool.
    pub fn unified(self) -> bool {
        matches!(self, AdapterKind::Integrated | AdapterKind::Software)
    }

    fn of(t: wgpu::DeviceType) -> AdapterKind {
        match t {
            wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
            wgpu::DeviceType::VirtualGpu => AdapterKind::Virtual,
            wgpu::DeviceType::Cpu => AdapterKind::Software,
            wgpu::DeviceType::Other => AdapterKind::Other,
        }
    }
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Virtual => "virtual",
            AdapterKind::Other => "unknown kind",
            AdapterKind::Software => "software",
        })
    }
}

/// Device-local memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vram {
    /// Size of the device-local heaps.
    pub total: u64,
    /// What this process may still take: the driver's own figure, or the total less a tenth.
    pub free: u64,
    /// Whether `free` is the driver's figure (`VK_EXT_memory_budget`).
    pub measured: bool,
}

/// One adapter, in words and figures.
#[derive(Debug, Clone)]
pub struct AdapterEntry {
    /// Position in the list, what `--adapter INDEX` means.
    pub index: usize,
    /// The driver's name for it.
    pub name: String,
    /// The programming interface behind it (`vulkan`).
    pub backend: String,
    /// Its kind.
    pub kind: AdapterKind,
    /// Driver name and version.
    pub driver: String,
    /// Its memory, where it can be asked.
    pub vram: Option<Vram>,
    /// Largest storage binding in bytes.
    pub binding_limit: u64,
    /// Largest buffer in bytes.
    pub buffer_limit: u64,
    /// Storage buffers a kernel may bind.
    pub storage_buffers: u32,
    /// Invocations of a workgroup.
    pub invocations: u32,
    /// Shared memory of a workgroup in bytes.
    pub shared_memory: u32,
    /// Smallest and largest subgroup.
    pub subgroup: (u32, u32),
    /// What the adapter has that this program uses when it is there.
    pub features: Vec<&'static str>,
}

impl AdapterEntry {
    /// The adapter as a person would want it in a list: `0: NAME (discrete, vulkan, driver …, 24.0 GB)`.
    pub fn line(&self) -> String {
        let memory = match self.vram {
            Some(v) => format!(", {:.1} GB", v.total as f64 / 1e9),
            None => String::new(),
        };
        let AdapterEntry { index, name, kind, backend, driver, .. } = self;
        format!("{index}: {name} ({kind}, {backend}, {driver}{memory})")
    }

    /// What this program's kernels need that the adapter lacks.
    pub fn lacks(&self) -> Option<String> {
        let need = [
            ("storage buffers", 8, self.storage_buffers),
            ("invocations a group", 256, self.invocations),
            ("bytes of shared memory", 16 << 10, self.shared_memory),
        ];
        let missing: Vec<String> = need
            .iter()
            .filter(|(_, want, has)| has < want)
            .map(|(what, want, has)| format!("{has} {what} of the {want} needed"))
            .collect();
        if missing.is_empty() { None } else { Some(missing.join(", ")) }
    }
}

/// Optional features this program uses, with the names they are shown by.
pub(super) const OPTIONAL: [(wgpu::Features, &str); 4] = [
    (wgpu::Features::TIMESTAMP_QUERY, "timestamps"),
    (wgpu::Features::SUBGROUP, "subgroups"),
    (wgpu::Features::PIPELINE_CACHE, "pipeline cache"),
    (wgpu::Features::SHADER_F16, "f16"),
];

/// The instance all adapters come from. `gpu_debug` sends labels and debug groups to the driver.
pub(super) fn instance(gpu_debug: bool) -> wgpu::Instance {
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = wgpu::Backends::PRIMARY;
    desc.flags = if gpu_debug { wgpu::InstanceFlags::DEBUG } else { wgpu::InstanceFlags::empty() };
    // Where the driver reports a budget, refuse a buffer that would make it swap to host memory.
    desc.memory_budget_thresholds.for_resource_creation = Some(95);
    wgpu::Instance::new(desc)
}

/// Every adapter of the machine, with its handle.
pub(super) fn enumerate(instance: &wgpu::Instance) -> Vec<(AdapterEntry, wgpu::Adapter)> {
    let found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    found.into_iter().enumerate().map(|(i, a)| (describe(i, &a), a)).collect()
}

/// Every adapter of the machine. Opens no device.
pub fn list() -> Vec<AdapterEntry> {
    enumerate(&instance(false)).into_iter().map(|(e, _)| e).collect()
}

fn describe(index: usize, adapter: &wgpu::Adapter) -> AdapterEntry {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let has = adapter.features();
    let driver = match (info.driver.as_str(), info.driver_info.as_str()) {
        ("", "") => "driver unknown".to_owned(),
        (d, "") | ("", d) => d.to_owned(),
        (d, v) => format!("{d} {v}"),
    };
    AdapterEntry {
        index,
        name: info.name,
        backend: info.backend.to_string(),
        kind: AdapterKind::of(info.device_type),
        driver,
        vram: vram(adapter),
        binding_limit: limits.max_storage_buffer_binding_size,
        buffer_limit: limits.max_buffer_size,
        storage_buffers: limits.max_storage_buffers_per_shader_stage,
        invocations: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x),
        shared_memory: limits.max_compute_workgroup_storage_size,
        subgroup: (info.subgroup_min_size, info.subgroup_max_size),
        features: OPTIONAL.iter().filter(|(f, _)| has.contains(*f)).map(|(_, n)| *n).collect(),
    }
}

/// Chooses among `adapters`. `wanted` is an index, a name, or a part of exactly one name (any case); without it a
/// discrete card goes before a virtual one, that before an integrated and an unknown one, and a software adapter is taken
/// only when `allow_software`.
///
/// # Errors
/// `Machine`, listing what was found, when nothing acceptable is there or the choice is not clear.
pub fn choose(adapters: &[AdapterEntry], wanted: Option<&str>, allow_software: bool) -> Result<usize> {
    let listing = || match adapters {
        [] => "no adapter was found".to_owned(),
        some => format!("found {}", some.iter().map(AdapterEntry::line).collect::<Vec<_>>().join("; ")),
    };
    let refuse = |what: String| Error::machine(what).cause(listing());
    let usable = |i: usize| match (adapters[i].lacks(), adapters[i].kind) {
        (Some(lacks), _) => Err(refuse(format!("adapter {} has {lacks}", adapters[i].name))),
        (None, AdapterKind::Software) if !allow_software => {
            Err(refuse(format!("adapter {} is a software adapter", adapters[i].name))
                .hint("pass --allow-software to accept it"))
        }
        _ => Ok(i),
    };
    if let Some(wanted) = wanted {
        let lower = wanted.to_lowercase();
        let by_index = wanted.parse::<usize>().ok().filter(|i| *i < adapters.len());
        let exact = adapters.iter().position(|a| a.name.to_lowercase() == lower);
        if let Some(i) = by_index.or(exact) {
            return usable(i);
        }
        let part: Vec<usize> =
            (0..adapters.len()).filter(|i| adapters[*i].name.to_lowercase().contains(&lower)).collect();
        return match part.as_slice() {
            [one] => usable(*one),
            [] => Err(refuse(format!("no adapter is named {wanted:?}"))),
            _ => Err(refuse(format!("several adapters are named {wanted:?}"))),
        };
    }
    let rank = |k: AdapterKind| match k {
        AdapterKind::Discrete => 0,
        AdapterKind::Virtual => 1,
        AdapterKind::Integrated => 2,
        AdapterKind::Other => 3,
        AdapterKind::Software => 4,
    };
    let best = (0..adapters.len())
        .filter(|i| adapters[*i].lacks().is_none())
        .filter(|i| allow_software || adapters[*i].kind != AdapterKind::Software)
        .min_by_key(|i| rank(adapters[*i].kind));
    match best {
        Some(i) => Ok(i),
        None if adapters.iter().any(|a| a.kind == AdapterKind::Software) && !allow_software => {
            Err(refuse("no hardware adapter".to_owned())
                .hint("pass --allow-software to accept a software adapter, or --device cpu"))
        }
        None => Err(refuse("no usable adapter".to_owned()).hint(
            "install a Vulkan driver (Debian, Ubuntu: libvulkan1 mesa-vulkan-drivers), or pass --device cpu",
        )),
    }
}

/// `VkPhysicalDeviceMemoryBudgetPropertiesEXT`, as the Vulkan specification lays it out.
#[cfg(target_os = "linux")]
#[repr(C)]
struct MemoryBudget {
    s_type: i32,
    p_next: *mut std::ffi::c_void,
    heap_budget: [u64; 16],
    heap_usage: [u64; 16],
}

/// The device-local heaps of a Vulkan adapter: their size, and what is free of them.
#[cfg(target_os = "linux")]
fn vram(adapter: &wgpu::Adapter) -> Option<Vram> {
    const DEVICE_LOCAL: u32 = 1;
    const BUDGET_PROPERTIES: i32 = 1_000_237_000;
    // SAFETY: the handle is only used for queries, and dropped before the adapter.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let shared = hal.shared_instance();
    let (raw, device) = (shared.raw_instance(), hal.raw_physical_device());
    // SAFETY: instance and physical device are alive as long as `hal`.
    let memory = unsafe { raw.get_physical_device_memory_properties(device) };
    let heaps = memory.memory_heaps.iter().take(memory.memory_heap_count as usize).enumerate();
    let local: Vec<(usize, u64)> =
        heaps.filter(|(_, h)| h.flags.as_raw() & DEVICE_LOCAL != 0).map(|(i, h)| (i, h.size)).collect();
    let total: u64 = local.iter().map(|(_, size)| size).sum();
    let guess = Vram { total, free: total / 10 * 9, measured: false };
    // The query is Vulkan 1.1.
    let reports = hal.physical_device_capabilities().supports_extension(c"VK_EXT_memory_budget");
    if !reports || shared.instance_api_version() < (1 << 22 | 1 << 12) {
        return Some(guess);
    }
    let mut budget = MemoryBudget {
        s_type: BUDGET_PROPERTIES,
        p_next: std::ptr::null_mut(),
        heap_budget: [0; 16],
        heap_usage: [0; 16],
    };
    let mut properties = Default::default();
    // SAFETY: `budget` has the layout and type tag of the extension's structure and outlives the second call; the
    // extension is supported by this physical device. The first call only fixes the type of `properties`.
    unsafe {
        raw.get_physical_device_memory_properties2(device, &mut properties);
        properties.p_next = (&raw mut budget).cast();
        raw.get_physical_device_memory_properties2(device, &mut properties);
    }
    let free = local.iter().map(|(i, _)| budget.heap_budget[*i].saturating_sub(budget.heap_usage[*i])).sum();
    Some(Vram { total, free, measured: true })
}

#[cfg(not(target_os = "linux"))]
fn vram(_: &wgpu::Adapter) -> Option<Vram> {
    None
}
