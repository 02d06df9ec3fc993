//! `model.safetensors.index.json`: which shard each tensor is read from.

use super::config::Config;
use super::folder::SmallFile;
use super::names::{self, Name};
use super::shards::ExpertTable;
use crate::error::{Error, Result};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

/// The assignment of tensors to shards. Parts of experts are kept flat, by their place in the expert table.
#[derive(Default)]
pub struct Assignment {
    /// File names by shard number.
    pub files: Vec<String>,
    /// Shard of every tensor that is no expert part and not of the vision tower.
    pub tensors: HashMap<String, u16>,
    /// Shard of every expert part.
    pub(super) experts: Vec<u16>,
}

impl Assignment {
    /// Shard of a tensor that is no expert part.
    pub fn shard_of(&self, name: &str) -> Option<u16> {
        self.tensors.get(name).copied()
    }

    /// Shard of the expert part at `at`.
    pub fn expert_shard(&self, at: usize) -> Option<u16> {
        self.experts.get(at).copied().filter(|s| *s != u16::MAX)
    }

    /// Position in the expert table and shard of every expert part that the index has.
    pub(super) fn assigned_experts(&self) -> impl Iterator<Item = (usize, u16)> {
        self.experts.iter().copied().enumerate().filter(|(_, shard)| *shard != u16::MAX)
    }

    /// Up to `n` names that are assigned to a shard, those of experts last.
    pub(super) fn first_names(&self, shard: usize, n: usize, table: &ExpertTable) -> Vec<String> {
        let in_shard = |s: &u16| usize::from(*s) == shard;
        let mut names: Vec<String> =
            self.tensors.iter().filter(|(_, s)| in_shard(s)).map(|(name, _)| name.clone()).collect();
        names.sort_unstable();
        names.truncate(n);
        let experts = self.experts.iter().enumerate().filter(|(_, s)| in_shard(s));
        let left = n - names.len();
        names.extend(experts.take(left).map(|(at, _)| table.name(at)));
        names
    }
}

/// Reads the map in one pass over the text, name by name: the release's has 497,220.
struct WeightMap<'a> {
    out: &'a mut Assignment,
    table: &'a ExpertTable,
    numbers: HashMap<String, u16>,
}

/// A string of the text, borrowed where it has no escapes.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }
    fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(v))
    }
    fn visit_str<E>(self, v: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(v.to_string()))
    }
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensor names to shards")
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key_seed(Text)? {
            let file = map.next_value_seed(Text)?;
            let shard = match self.numbers.get(file.as_ref()) {
                Some(n) => *n,
                None => {
                    let n = u16::try_from(self.out.files.len())
                        .ok()
                        .filter(|n| *n != u16::MAX)
                        .ok_or_else(|| A::Error::custom("too many shards"))?;
                    self.out.files.push(file.to_string());
                    self.numbers.insert(file.into_owned(), n);
                    n
                }
            };
            let repeated = match names::classify(&name) {
                Name::Vision => false,
                Name::Expert { layer, expert, part } => match self.table.at(layer, expert, part) {
                    Some(at) => std::mem::replace(&mut self.out.experts[at], shard) != u16::MAX,
                    None => false,
                },
                Name::Other => self.out.tensors.insert(name.to_string(), shard).is_some(),
            };
            if repeated {
                return Err(A::Error::custom(format_args!("the tensor {name} is listed twice")));
            }
        }
        Ok(())
    }
}

/// The whole file; other keys are passed over.
struct File<'a>(WeightMap<'a>);

impl<'de> Visitor<'de> for File<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut weights = Some(self.0);
        while let Some(key) = map.next_key_seed(Text)? {
            if key == "weight_map" {
                let seed = weights.take().ok_or_else(|| A::Error::duplicate_field("weight_map"))?;
                map.next_value_seed(seed)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        match weights {
            None => Ok(()),
            Some(_) => Err(A::Error::missing_field("weight_map")),
        }
    }
}

/// Reads the index in `file`.
pub(super) fn read(file: &SmallFile, config: &Config, table: &ExpertTable) -> Result<Assignment> {
    let parts = config.layers.len() * config.moe.experts * names::EXPERT_PARTS.len();
    let mut out = Assignment { experts: vec![u16::MAX; parts], ..Assignment::default() };
    let mut d = serde_json::Deserializer::from_slice(file.bytes());
    let map = WeightMap { out: &mut out, table, numbers: HashMap::new() };
    d.deserialize_map(File(map))
        .and_then(|()| d.end())
        .map_err(|e| Error::refused("the index cannot be read").file(&file.path).cause(e))?;
    if out.files.is_empty() {
        return Err(Error::refused("the index lists no tensor").file(&file.path));
    }
    Ok(out)
}
