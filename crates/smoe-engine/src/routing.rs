//! Statistics of the experts that tokens are sent to.

use smoe_format::Vault;
use smoe_model::ModelState;

/// Overlap of adjacent tokens and the distinct experts of a prompt.
#[derive(Debug)]
pub(crate) struct RoutingStatistics {
    top_k: usize,
    /// Stride of each sparse layer's records in bytes.
    strides: Vec<u64>,
    /// Choice of the last token, by sparse layer and rank.
    last: Vec<u32>,
    has_last: bool,
    /// Which experts were chosen since the last [`RoutingStatistics::start`].
    distinct: Vec<Vec<bool>>,
    shared: u64,
    compared: u64,
}

impl RoutingStatistics {
    pub(crate) fn new(vault: &Vault, top_k: usize) -> Self {
        let layers = &vault.header().expert_layers;
        let experts_per_layer: Vec<_> = layers.iter().map(|layer| layer.count as usize).collect();
        Self {
            top_k,
            strides: layers.iter().map(|layer| layer.stride).collect(),
            last: vec![0; layers.len() * top_k],
            has_last: false,
            distinct: experts_per_layer.iter().map(|&count| vec![false; count]).collect(),
            shared: 0,
            compared: 0,
        }
    }

    /// Begins a new count.
    pub(crate) fn start(&mut self) {
        self.has_last = false;
        (self.shared, self.compared) = (0, 0);
        for layer in &mut self.distinct {
            layer.fill(false);
        }
    }

    /// Takes the choice of the last forward pass in; overlap is counted between single tokens.
    pub(crate) fn record(&mut self, state: &ModelState, tokens: usize) {
        for (layer, distinct) in self.distinct.iter_mut().enumerate() {
            for token in 0..tokens {
                for &expert in state.chosen_experts(layer, token) {
                    distinct[expert as usize] = true;
                }
            }
            let Some(token) = tokens.checked_sub(1) else { continue };
            let chosen = state.chosen_experts(layer, token);
            let last = &mut self.last[layer * self.top_k..(layer + 1) * self.top_k];
            if tokens == 1 && self.has_last {
                self.shared += chosen.iter().filter(|expert| last.contains(expert)).count() as u64;
                self.compared += self.top_k as u64;
            }
            last.copy_from_slice(chosen);
        }
        self.has_last = tokens > 0;
    }

    /// Bytes of the distinct experts chosen since the start.
    pub(crate) fn distinct_bytes(&self) -> u64 {
        let chosen = self.distinct.iter().map(|layer| layer.iter().filter(|&&chosen| chosen).count() as u64);
        chosen.zip(&self.strides).map(|(count, stride)| count * stride).sum()
    }

    /// Share of experts that a decoded token has in common with the one before.
    pub(crate) fn adjacent_overlap(&self) -> Option<f64> {
        (self.compared > 0).then(|| self.shared as f64 / self.compared as f64)
    }
}
