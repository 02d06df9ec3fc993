//! Reference numbers, and how they are compared.

use safetensors::SafeTensors;
use std::path::PathBuf;

/// A safetensors file of reference values.
pub struct Golden {
    bytes: Vec<u8>,
}

/// Folder of a golden set (`base` or `toggles`).
pub fn golden_dir(set: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/goldens").join(set)
}

impl Golden {
    pub fn open(set: &str, file: &str) -> Golden {
        Golden { bytes: std::fs::read(golden_dir(set).join(file)).unwrap() }
    }
    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }
    pub fn has(&self, name: &str) -> bool {
        self.tensors().tensor(name).is_ok()
    }
    pub fn count(&self, prefix: &str) -> usize {
        self.tensors().names().iter().filter(|n| n.starts_with(prefix)).count()
    }
    pub fn count_containing(&self, part: &str) -> usize {
        self.tensors().names().iter().filter(|n| n.contains(part)).count()
    }
    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors().tensor(name).unwrap().shape().to_vec()
    }
    pub fn raw(&self, name: &str) -> Vec<u8> {
        self.tensors().tensor(name).unwrap().data().to_vec()
    }
    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.raw(name).chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }
    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.raw(name).chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }
}

/// `max|a-b| / max|b| <= gate`, written so that a NaN anywhere fails.
pub fn assert_close(name: &str, found: &[f32], reference: &[f32], gate: f64) {
    assert_eq!(found.len(), reference.len(), "{name}: another number of values");
    let scale = reference.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    for (i, (f, r)) in found.iter().zip(reference).enumerate() {
        let error = (f64::from(*f) - f64::from(*r)).abs();
        if !(error <= gate * scale) {
            panic!("{name}[{i}]: {f} for {r}, error {:e} of {gate:e}", error / scale);
        }
    }
}
