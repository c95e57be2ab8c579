//! One budget for everything: program, resident weights, KV cache, scratch and expert cache.

use serde::Serialize;
use smoe_model::{Model, ModelConfig, StateOptions};
use smoe_stream::{available_memory, format_size, process_rss_bytes};

use crate::error::BudgetError;
use crate::options::{CacheSize, EngineOptions};

/// Context where none is asked for, unless the model's own is shorter.
pub const DEFAULT_CONTEXT: usize = 8_192;

/// Prefill chunks to choose from, in tokens. Longer ones read each expert fewer times per prompt.
const CHUNKS: [usize; 6] = [512, 256, 128, 64, 32, 16];

/// What the program itself may still take after the plan is made: stacks of its threads, read buffers, output.
/// Together with the memory it holds at that time, this is the allowance for the program itself.
const PROGRAM_GROWTH_BYTES: u64 = 24 << 20;

/// Share of the memory to spare that is left to the rest of the machine when no budget is given, and its least.
const RESERVE_DIVISOR: u64 = 10;
const RESERVE_BYTES: u64 = 256 << 20;

/// How the budget is spent, in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryPlan {
    /// The ceiling.
    pub budget_bytes: u64,
    /// Where it comes from.
    pub budget_origin: String,
    /// The program itself: what it holds when the plan is made, and an allowance.
    pub program_bytes: u64,
    /// Resident weights.
    pub resident_bytes: u64,
    /// KV cache.
    pub kv_bytes: u64,
    /// Buffers of the forward pass.
    pub scratch_bytes: u64,
    /// Expert cache.
    pub cache_bytes: u64,
    /// Context in tokens.
    pub context: usize,
    /// Prefill chunk in tokens.
    pub chunk: usize,
}

/// What a vault needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    pub(crate) resident_bytes: u64,
    /// Largest stride of a record; 0 without experts.
    pub(crate) slot_bytes: u64,
    /// Records of all layers.
    pub(crate) experts: u64,
    /// The KV cache for the context.
    pub(crate) kv_bytes: u64,
    /// Fewest slots that keep a token's reads in flight at once.
    pub(crate) least_slots: u64,
}

impl MemoryPlan {
    /// Divides the budget; the expert cache gets what is left.
    pub(crate) fn new(
        config: &ModelConfig,
        needs: &Needs,
        options: &EngineOptions,
        context: usize,
    ) -> Result<Self, BudgetError> {
        let program_bytes = process_rss_bytes().unwrap_or(0) + PROGRAM_GROWTH_BYTES;
        let (budget_bytes, budget_origin) = match options.memory {
            Some(bytes) => (bytes, "--memory".to_owned()),
            None => {
                let available = available_memory();
                let reserve = (available.bytes / RESERVE_DIVISOR).max(RESERVE_BYTES);
                let spare = available.bytes.saturating_sub(reserve) + process_rss_bytes().unwrap_or(0);
                (spare, format!("from {}, {} left free", available.source, format_size(reserve)))
            }
        };
        let whole_cache = needs.slot_bytes * needs.experts;
        let least_cache = needs.slot_bytes * needs.least_slots;
        let wanted_cache = match options.cache {
            CacheSize::Auto => least_cache,
            CacheSize::All => whole_cache,
            // Whole slots, and at least the fewest.
            CacheSize::Bytes(bytes) => {
                (bytes.min(whole_cache) / needs.slot_bytes.max(1) * needs.slot_bytes).max(least_cache)
            }
        };
        let plan_with = |chunk: usize| {
            let state = state_options(options, context, chunk);
            Self {
                budget_bytes,
                budget_origin: budget_origin.clone(),
                program_bytes,
                resident_bytes: needs.resident_bytes,
                kv_bytes: needs.kv_bytes,
                scratch_bytes: Model::scratch_bytes(config, &state),
                cache_bytes: wanted_cache,
                context,
                chunk,
            }
        };
        let longest = |chunk: &usize| *chunk <= context.next_power_of_two().max(CHUNKS[CHUNKS.len() - 1]);
        let mut plans: Vec<_> = match options.chunk {
            Some(chunk) => vec![plan_with(chunk)],
            None => CHUNKS.iter().copied().filter(longest).map(plan_with).collect(),
        };
        // The longest chunk whose buffers are small beside what they leave for experts; else the shortest.
        let comfortable = |plan: &Self| {
            plan.total() <= budget_bytes && plan.scratch_bytes <= plan.spare() / 4 + plan.cache_bytes / 4
        };
        let chosen = plans.iter().position(comfortable).unwrap_or(plans.len() - 1);
        let mut plan = plans.swap_remove(chosen);
        if plan.total() > budget_bytes {
            return Err(plan.refusal(options));
        }
        if options.cache == CacheSize::Auto && needs.slot_bytes > 0 {
            let slots = (plan.spare() + plan.cache_bytes) / needs.slot_bytes;
            plan.cache_bytes = slots.min(needs.experts) * needs.slot_bytes;
        }
        Ok(plan)
    }

    /// All parts together.
    #[must_use]
    pub fn total(&self) -> u64 {
        [self.program_bytes, self.resident_bytes, self.kv_bytes, self.scratch_bytes, self.cache_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// Size of the buffer that memory is probed with: what will be taken anyway, up to a size beyond all caches.
    pub(crate) fn probe_bytes(&self) -> usize {
        const BEYOND_CACHES: u64 = 256 << 20;
        (self.total() - self.program_bytes).min(BEYOND_CACHES) as usize
    }

    /// What the parts leave of the budget.
    fn spare(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.total())
    }

    fn refusal(&self, options: &EngineOptions) -> BudgetError {
        let parts = [
            ("program", self.program_bytes),
            ("resident weights", self.resident_bytes),
            ("KV cache", self.kv_bytes),
            ("scratch", self.scratch_bytes),
            ("expert cache", self.cache_bytes),
        ];
        let advice = match options.cache {
            CacheSize::Auto => format!("a shorter --ctx than {} or --kv q8 needs less", self.context),
            _ => format!("a smaller --cache or a shorter --ctx than {} needs less", self.context),
        };
        BudgetError {
            budget: self.budget_bytes,
            origin: self.budget_origin.clone(),
            needed: round_up(self.total()),
            parts: parts.map(|(name, bytes)| format!("{name} {}", format_size(bytes))).join(", "),
            advice,
        }
    }
}

/// The next mebibyte, so that the number that is named holds a little later too.
fn round_up(bytes: u64) -> u64 {
    const STEP: u64 = 1 << 20;
    bytes.checked_next_multiple_of(STEP).unwrap_or(bytes).saturating_add(STEP)
}

pub(crate) fn state_options(options: &EngineOptions, context: usize, chunk: usize) -> StateOptions {
    StateOptions { context, kv: options.kv, chunk, logits_rows: options.logits_rows.min(chunk).max(1) }
}
