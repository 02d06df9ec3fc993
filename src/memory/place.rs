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
    /// Trunk units in the order of use: the layers, then the output head.
    pub units: Vec<u64>,
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
    /// Trunk that stays in memory.
    pub trunk: u64,
    /// Which units stay, in the order of the demand.
    #[serde(skip)]
    pub resident: Vec<bool>,
    /// Trunk that is read for every pass.
    pub streamed: u64,
    /// The two buffers that streamed units go through.
    pub ring: u64,
    /// Experts that fit the cache.
    pub expert_slots: u64,
    /// Bytes of the expert cache.
    pub expert_cache: u64,
}

impl Placement {
    /// Everything placed.
    pub fn total(&self) -> u64 {
        self.state + self.scratch + self.trunk + self.ring + self.expert_cache
    }

    /// Divides `budget`, or says by how much it is too small.
    pub fn new(budget: u64, d: &Demand) -> Result<Placement> {
        let least_slots = d.experts.min(2 * d.chosen);
        let fixed = d.state + d.scratch + least_slots * d.expert;
        // The head is used for every token whatever the routing, and is the largest unit but one.
        let order: Vec<usize> =
            d.units.len().checked_sub(1).into_iter().chain(0..d.units.len().saturating_sub(1)).collect();
        let mut resident = vec![false; d.units.len()];
        let all: u64 = d.units.iter().sum();
        let (mut trunk, mut ring) = (0, 0);
        if fixed + all <= budget {
            resident.fill(true);
            trunk = all;
        } else {
            let largest_of = |at: usize| order[at..].iter().map(|u| d.units[*u]).max().unwrap_or(0);
            ring = 2 * largest_of(0);
            if fixed + ring > budget {
                return Err(Error::machine(format!("the model does not fit {budget} bytes of memory"))
                    .cause(format_args!(
                        "state {} + scratch {} + {least_slots} experts {} + buffers for streamed layers {ring} = {} bytes",
                        d.state,
                        d.scratch,
                        least_slots * d.expert,
                        fixed + ring
                    ))
                    .hint("free memory, or plan for a shorter --context"));
            }
            for (at, u) in order.iter().enumerate() {
                let next_ring = 2 * largest_of(at + 1);
                if fixed + trunk + d.units[*u] + next_ring > budget {
                    break;
                }
                trunk += d.units[*u];
                ring = next_ring;
                resident[*u] = true;
            }
        }
        let rest = budget - (d.state + d.scratch + trunk + ring);
        let expert_slots = rest.checked_div(d.expert).unwrap_or(0).min(d.experts);
        Ok(Placement {
            budget,
            state: d.state,
            scratch: d.scratch,
            trunk,
            resident,
            streamed: all - trunk,
            ring,
            expert_slots,
            expert_cache: expert_slots * d.expert,
        })
    }
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
        Demand { state: 10, scratch: 5, units: vec![30, 20, 20, 25], expert: 2, experts: 40, chosen: 4 }
    }

    #[test]
    fn everything_fits() -> Result<()> {
        let p = Placement::new(1000, &demand())?;
        assert_eq!((p.trunk, p.streamed, p.ring, p.expert_slots), (95, 0, 0, 40));
        Ok(())
    }

    #[test]
    fn too_small_names_the_sum() {
        let e = Placement::new(90, &demand()).err().map(|e| (e.kind(), e.to_string()));
        assert!(e.is_some_and(|(k, t)| k == crate::Kind::Machine && t.contains("= 91 bytes")));
    }

    #[test]
    fn the_head_stays_before_the_layers() -> Result<()> {
        let p = Placement::new(10 + 5 + 16 + 25 + 60, &demand())?;
        assert_eq!(p.resident, [false, false, false, true]);
        assert_eq!((p.ring, p.streamed), (60, 70));
        Ok(())
    }

    proptest! {
        #[test]
        fn never_over_budget(budget in 0u64..500, units in prop::collection::vec(1u64..50, 1..8), state in 0u64..50) {
            let d = Demand { units, state, ..demand() };
            if let Ok(p) = Placement::new(budget, &d) {
                prop_assert!(p.total() <= budget);
                prop_assert!(p.expert_slots >= d.chosen);
                let kept: u64 = p.resident.iter().zip(&d.units).filter(|(r, _)| **r).map(|(_, u)| u).sum();
                prop_assert_eq!(kept, p.trunk);
            }
        }
    }
}
