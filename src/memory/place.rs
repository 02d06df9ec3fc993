//! How memory is divided: state and scratch first, then the trunk, then the expert cache.

use crate::error::{Error, Result};
use crate::model::GpuPlan;
use serde::Serialize;

/// What has to be placed, in bytes unless said otherwise.
#[derive(Debug, Clone)]
pub struct Demand {
    /// State of the sequence at the planned context, both copies.
    pub state: u64,
    /// Buffers of a pass.
    pub scratch: u64,
    /// Vectors of the trunk, widened: they always stay.
    pub vectors: u64,
    /// Matrices of each trunk unit in the order of use: the layers, then the output head.
    pub units: Vec<Vec<u64>>,
    /// A buffer of the ring that streamed matrices go through.
    pub block: u64,
    /// Buffers that the ring has where memory allows.
    pub blocks: u64,
    /// One routed expert.
    pub expert: u64,
    /// Routed experts in all.
    pub experts: u64,
    /// Experts chosen per token and layer.
    pub chosen: u64,
}

/// A division of memory that fits its budget.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct Placement {
    /// The budget.
    pub budget: u64,
    /// State, both copies.
    pub state: u64,
    /// Buffers of a pass.
    pub scratch: u64,
    /// Trunk that stays in memory, the vectors among it.
    pub trunk: u64,
    /// Which matrices of each unit stay, in the order of the demand.
    #[serde(skip)]
    pub resident: Vec<Vec<bool>>,
    /// Trunk that is read for every pass.
    pub streamed: u64,
    /// Bytes of the ring that streamed matrices go through.
    pub ring: u64,
    /// Buffers of the ring.
    pub ring_blocks: u64,
    /// Experts that fit the cache.
    pub expert_slots: u64,
    /// Bytes of the expert cache.
    pub expert_cache: u64,
}

/// The fewest buffers of a ring: one in use and one being read.
const LEAST_BLOCKS: u64 = 2;

impl Placement {
    /// Everything placed.
    pub fn total(&self) -> u64 {
        self.state + self.scratch + self.trunk + self.ring + self.expert_cache
    }

    /// Divides `budget`, or says by how much it is too small.
    pub fn new(budget: u64, d: &Demand) -> Result<Placement> {
        let least_slots = d.experts.min(2 * d.chosen);
        let fixed = d.state + d.scratch + d.vectors + least_slots * d.expert;
        let all: u64 = d.units.iter().flatten().sum();
        let (mut ring_blocks, mut resident) = (0, whole(d, true));
        if fixed + all > budget {
            let room = budget.saturating_sub(fixed).checked_div(d.block).unwrap_or(0);
            ring_blocks = d.blocks.min(room).max(LEAST_BLOCKS);
            let ring = ring_blocks * d.block;
            if fixed + ring > budget {
                return Err(Error::machine(format!("the model does not fit {budget} bytes of memory"))
                    .cause(format_args!(
                        "state {} + scratch {} + vectors {} + {least_slots} experts {} + buffers for streamed matrices {ring} = {} bytes",
                        d.state,
                        d.scratch,
                        d.vectors,
                        least_slots * d.expert,
                        fixed + ring
                    ))
                    .hint(format!("--ram {}, a shorter --context or a smaller --prefill-chunk", fixed + ring)));
            }
            resident = spread(d, all, budget - fixed - ring);
        }
        let kept = |(unit, stays): (&Vec<u64>, &Vec<bool>)| -> u64 {
            unit.iter().zip(stays).filter(|(_, stays)| **stays).map(|(bytes, _)| bytes).sum()
        };
        let trunk: u64 = d.units.iter().zip(&resident).map(kept).sum();
        let ring = ring_blocks * d.block;
        let rest = budget - (d.state + d.scratch + d.vectors + trunk + ring);
        let expert_slots = rest.checked_div(d.expert).unwrap_or(0).min(d.experts);
        Ok(Placement {
            budget,
            state: d.state,
            scratch: d.scratch,
            trunk: trunk + d.vectors,
            resident,
            streamed: all - trunk,
            ring,
            ring_blocks,
            expert_slots,
            expert_cache: expert_slots * d.expert,
        })
    }
}

/// The same answer for every matrix.
fn whole(d: &Demand, stays: bool) -> Vec<Vec<bool>> {
    d.units.iter().map(|unit| vec![stays; unit.len()]).collect()
}

/// Which matrices stay in `room` bytes. The head stays first: it is one long stretch of reading at the end of a token. The
/// rest is spread evenly over the layers, so that while one matrix is multiplied from memory the next streamed one is
/// read, and neither the drive nor the processor waits for a whole layer.
fn spread(d: &Demand, all: u64, mut room: u64) -> Vec<Vec<bool>> {
    let mut resident = whole(d, false);
    let Some((head, layers)) = d.units.split_last() else { return resident };
    let (head_bytes, last) = (head.iter().sum::<u64>(), layers.len());
    if head_bytes <= room {
        resident[last].fill(true);
        room -= head_bytes;
    }
    let rest = u128::from(all - head_bytes);
    let share = u128::from(room);
    // Bytes that should have stayed by now, less those that do, as multiples of 1/rest.
    let mut owed: i128 = 0;
    for (unit, stays) in layers.iter().zip(&mut resident) {
        for (bytes, stays) in unit.iter().zip(stays) {
            owed += (u128::from(*bytes) * share) as i128;
            let cost = (u128::from(*bytes) * rest) as i128;
            if 2 * owed >= cost && *bytes <= room {
                *stays = true;
                room -= bytes;
                owed -= cost;
            }
        }
    }
    resident
}

/// Which units (the layers, then the output head) the GPU takes: in order as far as the budget goes, or all. `units` are
/// their whole demands on the device, `scratch` what a pass needs there besides.
pub fn fill_device(plan: &GpuPlan, scratch: u64, units: &[u64]) -> Result<Vec<bool>> {
    let all = scratch + units.iter().sum::<u64>();
    if plan.everything && all > plan.budget {
        return Err(Error::machine("the model does not fit the GPU memory budget")
            .device(plan.gpu.name())
            .cause(format_args!(
                "weights, experts and state {} + scratch {scratch} = {all} bytes, the budget is {}",
                all - scratch,
                plan.budget
            ))
            .hint(format!("--vram {all}, or --device auto to leave part of the model on the CPU")));
    }
    let mut used = scratch;
    let mut room = true;
    Ok(units
        .iter()
        .map(|u| {
            room &= used + u <= plan.budget;
            used += if room { *u } else { 0 };
            room
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demand() -> Demand {
        Demand {
            state: 10,
            scratch: 3,
            vectors: 2,
            units: vec![vec![20, 10], vec![15, 5], vec![15, 5], vec![25]],
            block: 8,
            blocks: 4,
            expert: 2,
            experts: 40,
            chosen: 4,
        }
    }

    #[test]
    fn everything_fits() -> Result<()> {
        let p = Placement::new(1000, &demand())?;
        assert_eq!((p.trunk, p.streamed, p.ring, p.expert_slots), (97, 0, 0, 40));
        Ok(())
    }

    #[test]
    fn too_small_names_the_sum() {
        let e = Placement::new(46, &demand()).err().map(|e| (e.kind(), e.to_string()));
        assert!(e.is_some_and(|(k, t)| k == crate::Kind::Machine && t.contains("= 47 bytes")));
        assert!(Placement::new(47, &demand()).is_ok());
    }

    #[test]
    fn the_head_stays_before_the_layers_and_they_share_the_rest() -> Result<()> {
        let p = Placement::new(10 + 5 + 16 + 32 + 25 + 30, &demand())?;
        assert_eq!(p.resident[3], [true]);
        assert_eq!(p.ring_blocks, 4);
        let kept: Vec<usize> = p.resident[..3].iter().map(|u| u.iter().filter(|r| **r).count()).collect();
        assert!(kept.iter().all(|n| *n >= 1), "every layer keeps something: {kept:?}");
        assert!(p.streamed >= 30 && p.streamed <= 45, "{}", p.streamed);
        Ok(())
    }

    proptest! {
        #[test]
        fn never_over_budget(
            budget in 0u64..500,
            units in prop::collection::vec(prop::collection::vec(1u64..50, 1..4), 1..8),
            state in 0u64..50,
        ) {
            let d = Demand { units, state, ..demand() };
            if let Ok(p) = Placement::new(budget, &d) {
                prop_assert!(p.total() <= budget);
                prop_assert!(p.expert_slots >= d.chosen);
                let flat = p.resident.iter().flatten().zip(d.units.iter().flatten());
                let kept: u64 = flat.filter(|(r, _)| **r).map(|(_, u)| u).sum();
                prop_assert_eq!(kept + d.vectors, p.trunk);
                prop_assert_eq!(kept + p.streamed, d.units.iter().flatten().sum::<u64>());
                // What is streamed has a ring to go through.
                prop_assert!(p.streamed == 0 || p.ring_blocks >= 2);
            }
        }
    }
}
