//! What a pass computes, tensor by tensor: kept in a temporary file for the first device, held against it for the second.

use crate::compute::ops::moe::Routing;
use crate::compute::{cpu::vector, device::Tensor};
use crate::error::{Error, Result};
use crate::model::session::Session;
use crate::model::{Model, Observer, Point};
use crate::text::sampler::log_softmax_at;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How far the second device's values are from the first's.
#[derive(Debug, Clone, Copy, Default)]
pub struct Worst {
    difference: f64,
    largest: f64,
}

impl Worst {
    fn add(&mut self, first: f32, second: f32) {
        let worse = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
        self.difference = worse(self.difference, (f64::from(first) - f64::from(second)).abs());
        self.largest = worse(self.largest, f64::from(first).abs());
    }

    /// `max|second-first| / max|first|` over all positions.
    pub fn relative(&self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { self.difference / self.largest }
    }
}

/// What a value of the file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// A tensor of a layer, by the place of its point in [`POINTS`].
    Layer(usize, u8),
    /// A row of logits.
    Logits,
}

/// Points in the order in which reports name them.
pub const POINTS: [(Point, &str); 13] = [
    (Point::AttnRes, "attn_res"),
    (Point::AttnProbs, "attn_probs"),
    (Point::AttnIn, "attn_in"),
    (Point::AttnOut, "attn_out"),
    (Point::FfnRes, "ffn_res"),
    (Point::FfnProbs, "ffn_probs"),
    (Point::FfnIn, "ffn_in"),
    (Point::LatentSum, "latent_sum"),
    (Point::FfnOut, "ffn_out"),
    (Point::Out, "out"),
    (Point::FinalRes, "final_res"),
    (Point::FinalProbs, "final_probs"),
    (Point::FinalNorm, "final_norm"),
];

/// Its place in [`POINTS`].
pub fn number(point: Point) -> u8 {
    POINTS.iter().position(|(p, _)| *p == point).unwrap_or(0) as u8
}

/// Where the values of a pass go.
enum Side {
    /// Those of the first device, into the file.
    Write(BufWriter<File>),
    /// Those of the second, held against the file.
    Read { file: BufReader<File>, next: usize, worst: BTreeMap<What, Worst> },
}

/// The values of the first device, being written or being compared with.
pub struct Spool {
    side: Side,
    /// What the file holds, in order, with the number of values.
    held: Vec<(What, usize)>,
    /// Expert sets by layer, a sorted list a position.
    experts: Vec<Vec<Vec<u32>>>,
    /// Those of the first device, while the second's are compared.
    first_experts: Vec<Vec<Vec<u32>>>,
    failed: Option<Error>,
}

impl Spool {
    /// A file for the values of the first device. It has no name, so nothing is left of it however the run ends.
    pub fn create() -> Result<Spool> {
        let file = tempfile::tempfile().map_err(|e| Error::io("cannot make a temporary file", e))?;
        let side = Side::Write(BufWriter::new(file));
        let (experts, first_experts) = (Vec::new(), Vec::new());
        Ok(Spool { side, held: Vec::new(), experts, first_experts, failed: None })
    }

    /// The same, for the second device to be held against.
    pub fn compared(self) -> Result<Spool> {
        let fail = |e| Error::io("cannot read the temporary file", e);
        let Side::Write(file) = self.side else { return Err(Error::run("nothing was recorded")) };
        let mut file = file.into_inner().map_err(|e| fail(e.into_error()))?;
        file.rewind().map_err(fail)?;
        let side = Side::Read { file: BufReader::new(file), next: 0, worst: BTreeMap::new() };
        Ok(Spool { side, first_experts: self.experts, experts: Vec::new(), ..self })
    }

    /// How far the second device's values are from the first's.
    pub fn worst(&self) -> BTreeMap<What, Worst> {
        match &self.side {
            Side::Read { worst, .. } => worst.clone(),
            Side::Write(_) => BTreeMap::new(),
        }
    }

    /// Positions at which the devices chose other experts in layer `i`.
    pub fn experts_differ(&self, i: usize) -> usize {
        match (self.first_experts.get(i), self.experts.get(i)) {
            (Some(a), Some(b)) => a.iter().zip(b).filter(|(a, b)| a != b).count(),
            _ => 0,
        }
    }

    fn values(&mut self, what: What, values: &[f32]) -> Result<()> {
        match &mut self.side {
            Side::Write(file) => {
                self.held.push((what, values.len()));
                let bytes: &[u8] = bytemuck::cast_slice(values);
                file.write_all(bytes).map_err(|e| Error::io("cannot write to the temporary file", e))
            }
            Side::Read { file, next, worst } => {
                if self.held.get(*next) != Some(&(what, values.len())) {
                    return Err(Error::run("the devices computed other tensors").expected(
                        format_args!("{:?}", self.held.get(*next)),
                        format_args!("{what:?} of {}", values.len()),
                    ));
                }
                *next += 1;
                let mut first = vec![0f32; values.len()];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut first);
                file.read_exact(bytes).map_err(|e| Error::io("cannot read the temporary file", e))?;
                let worst = worst.entry(what).or_default();
                first.iter().zip(values).for_each(|(a, b)| worst.add(*a, *b));
                Ok(())
            }
        }
    }

    fn keep(&mut self, result: Result<()>) {
        if let Err(e) = result {
            self.failed.get_or_insert(e);
        }
    }
}

/// Sees a pass and hands its tensors on.
struct Watch<'a, 's> {
    spool: &'a Mutex<&'s mut Spool>,
    seen: &'a mut dyn Observer,
}

fn lock<'a, 'b>(spool: &'a Mutex<&'b mut Spool>) -> MutexGuard<'a, &'b mut Spool> {
    spool.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Observer for Watch<'_, '_> {
    fn layer(&mut self, i: usize, n: usize) {
        self.seen.layer(i, n);
    }
    fn wants_tensors(&self) -> bool {
        true
    }
    fn tensor(&mut self, point: Point, i: usize, values: &Tensor) {
        let mut spool = lock(self.spool);
        if spool.failed.is_none() {
            let result = spool.values(What::Layer(i, number(point)), values.host());
            spool.keep(result);
        }
    }
    fn routing(&mut self, i: usize, routing: &Routing) {
        let mut spool = lock(self.spool);
        if spool.experts.len() <= i {
            spool.experts.resize(i + 1, Vec::new());
        }
        for experts in routing.experts.chunks(routing.chosen.max(1)) {
            let mut set = experts.to_vec();
            set.sort_unstable();
            spool.experts[i].push(set);
        }
    }
}

/// The greedy token of a row, and how far the second best is, as a share of the largest |logit|.
fn greedy(row: &[f32]) -> Result<(u32, f64)> {
    let best = vector::argmax(row).ok_or_else(|| Error::run("there are no logits"))?;
    let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
    let second = row.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, v)| *v).fold(f32::MIN, f32::max);
    let margin = f64::from(row[best] - second) / f64::from(largest.max(f32::MIN_POSITIVE));
    Ok((best as u32, margin))
}

/// Feeds `ids` to a new sequence, its tensors to `spool`; the greedy tokens with their margins, and the NLL.
pub fn observed(
    model: &Arc<Model>,
    ids: &[u32],
    chunk: usize,
    spool: &mut Spool,
    seen: &mut dyn Observer,
) -> Result<(Vec<(u32, f64)>, f64)> {
    // Both the observer and the taker of the logits write to it, one after the other.
    let spool = &Mutex::new(spool);
    let mut session = Session::new(model.clone())?;
    let (mut tokens, mut sum) = (Vec::with_capacity(ids.len()), 0.0);
    for part in ids.chunks(chunk) {
        let mut watch = Watch { spool, seen: &mut *seen };
        session.feed_all(part, &mut watch, &mut |position, row| {
            if let Some(next) = ids.get(position + 1) {
                sum -= log_softmax_at(row, *next);
            }
            tokens.push(greedy(row)?);
            lock(spool).values(What::Logits, row)
        })?;
        if let Some(e) = lock(spool).failed.take() {
            return Err(e);
        }
    }
    Ok((tokens, sum / (ids.len() - 1) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_a_number_stays() {
        let mut w = Worst::default();
        w.add(2.0, 2.5);
        assert_eq!(w.relative(), 0.25);
        w.add(1.0, f32::NAN);
        w.add(1.0, 1.0);
        assert!(w.relative().is_nan());
    }

    #[test]
    fn margins_are_shares_of_the_largest_logit() {
        assert_eq!(greedy(&[1.0, -8.0, 3.0]).unwrap(), (2, 0.25));
        assert_eq!(greedy(&[3.0, 3.0]).unwrap(), (0, 0.0));
        assert!(greedy(&[]).is_err());
    }
}
