//! From logits to the next token.

use serde::{Deserialize, Serialize};

use crate::error::EngineError;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SamplingOptions {
    /// Divides the logits; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Keeps the likeliest tokens only; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest tokens whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that the sequence holds already (Keskar et al.
    /// 2019, arXiv 1909.05858); 1 changes nothing.
    pub repetition_penalty: f32,
    /// The same seed with the same options and prompt gives the same tokens.
    pub seed: u64,
}

impl SamplingOptions {
    /// Always the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }

    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`EngineError::Sampling`] names the first that is out of it.
    pub fn check(&self) -> Result<(), EngineError> {
        let within = |option, value: f32, low: f32, high: f32, expected| {
            if value.is_finite() && (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(EngineError::Sampling { option, expected, found: value.to_string() })
            }
        };
        within("temperature", self.temperature, 0.0, 100.0, "a number from 0 to 100")?;
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "a number above 0, up to 1")?;
        within("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
    }
}

/// A sampler with its random state and buffers.
#[derive(Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: SplitMix64,
    candidates: Vec<Candidate>,
    /// Round in which a token was last seen in the history.
    seen: Vec<u32>,
    round: u32,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    /// First a logit, then a weight relative to the likeliest.
    value: f32,
}

impl Sampler {
    /// A sampler for a vocabulary.
    ///
    /// # Errors
    /// An option is out of its range.
    pub fn new(options: SamplingOptions, vocab_size: usize) -> Result<Self, EngineError> {
        options.check()?;
        Ok(Self {
            options,
            random: SplitMix64(options.seed),
            candidates: Vec::with_capacity(vocab_size),
            seen: vec![0; vocab_size],
            round: 0,
        })
    }

    /// Chooses a token; `logits` are finite, one per token, and may be changed. `history` is the sequence so far.
    ///
    /// The order of the steps is that of `transformers`: repetition penalty, temperature, top-k, top-p, min-p.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> u32 {
        self.penalize(logits, history);
        if self.options.temperature == 0.0 {
            return likeliest(logits);
        }
        self.candidates.clear();
        self.candidates.extend(
            logits.iter().enumerate().map(|(token, &value)| Candidate { token: token as u32, value }),
        );
        self.keep_top_k();
        self.weigh();
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    fn penalize(&mut self, logits: &mut [f32], history: &[u32]) {
        let penalty = self.options.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        self.round += 1;
        for &token in history {
            let (Some(seen), Some(logit)) =
                (self.seen.get_mut(token as usize), logits.get_mut(token as usize))
            else {
                continue;
            };
            if std::mem::replace(seen, self.round) != self.round {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }

    fn keep_top_k(&mut self) {
        let top_k = self.options.top_k;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, descending);
            self.candidates.truncate(top_k);
        }
    }

    /// Weights relative to the likeliest token, in descending order.
    fn weigh(&mut self) {
        self.candidates.sort_unstable_by(descending);
        let max = self.candidates.first().map_or(0.0, |candidate| candidate.value);
        for candidate in &mut self.candidates {
            candidate.value = ((candidate.value - max) / self.options.temperature).exp();
        }
    }

    fn keep_top_p(&mut self) {
        if self.options.top_p >= 1.0 {
            return;
        }
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.value)).sum();
        let wanted = f64::from(self.options.top_p) * total;
        let mut sum = 0.0;
        let kept = self.candidates.iter().position(|candidate| {
            sum += f64::from(candidate.value);
            sum >= wanted
        });
        if let Some(last) = kept {
            self.candidates.truncate(last + 1);
        }
    }

    fn keep_min_p(&mut self) {
        let min_p = self.options.min_p;
        if min_p > 0.0 {
            // The likeliest token has weight 1 and stays.
            let kept = self.candidates.iter().take_while(|candidate| candidate.value >= min_p).count();
            self.candidates.truncate(kept.max(1));
        }
    }

    fn draw(&mut self) -> u32 {
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.value)).sum();
        let mut left = self.random.unit() * total;
        for candidate in &self.candidates {
            left -= f64::from(candidate.value);
            if left < 0.0 {
                return candidate.token;
            }
        }
        // Rounding may leave a crumb; it belongs to the last candidate.
        self.candidates.last().map_or(0, |candidate| candidate.token)
    }
}

/// By descending value, the lower token first among equals.
fn descending(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.value.total_cmp(&a.value).then(a.token.cmp(&b.token))
}

/// The token with the largest logit, the lowest one among equals.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": a fixed, portable sequence per seed.
#[derive(Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0.0..1.0` with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(change: impl FnOnce(&mut SamplingOptions)) -> SamplingOptions {
        let mut options = SamplingOptions { temperature: 1.0, ..SamplingOptions::greedy() };
        change(&mut options);
        options
    }

    /// How often each of five tokens is drawn in 20,000 tries.
    fn shares(options: SamplingOptions, history: &[u32]) -> [f64; 5] {
        const TRIES: usize = 20_000;
        let logits = [0.5f32, 0.2, 0.15, 0.1, 0.05].map(f32::ln);
        let mut sampler = Sampler::new(options, 5).unwrap();
        let mut counts = [0usize; 5];
        for _ in 0..TRIES {
            counts[sampler.sample(&mut logits.clone(), history) as usize] += 1;
        }
        counts.map(|count| count as f64 / TRIES as f64)
    }

    fn close(found: [f64; 5], expected: [f64; 5]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 0.015, "{found} is not {expected}");
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        close(shares(options(|_| {}), &[]), [0.5, 0.2, 0.15, 0.1, 0.05]);
    }

    #[test]
    fn temperature_flattens() {
        let roots = [0.5f64, 0.2, 0.15, 0.1, 0.05].map(f64::sqrt);
        let total: f64 = roots.iter().sum();
        close(shares(options(|o| o.temperature = 2.0), &[]), roots.map(|root| root / total));
    }

    #[test]
    fn top_k_keeps_the_likeliest() {
        close(shares(options(|o| o.top_k = 2), &[]), [5.0 / 7.0, 2.0 / 7.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_the_sum() {
        close(shares(options(|o| o.top_p = 0.69), &[]), [5.0 / 7.0, 2.0 / 7.0, 0.0, 0.0, 0.0]);
        close(shares(options(|o| o.top_p = 0.71), &[]), [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0.0, 0.0]);
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest() {
        close(shares(options(|o| o.min_p = 0.25), &[]), [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0.0, 0.0]);
    }

    #[test]
    fn repeated_tokens_are_penalized_once() {
        let greedy = SamplingOptions { repetition_penalty: 2.0, ..SamplingOptions::greedy() };
        let mut sampler = Sampler::new(greedy, 3).unwrap();
        let mut logits = [3.0, 2.0, -1.0];
        assert_eq!(sampler.sample(&mut logits, &[0, 0, 0, 2]), 1);
        assert_eq!(logits, [1.5, 2.0, -2.0]);
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens_and_another_one_others() {
        let draw = |seed| {
            let mut sampler = Sampler::new(options(|o| o.seed = seed), 5).unwrap();
            (0..50).map(|_| sampler.sample(&mut [0.0; 5], &[])).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn greedy_takes_the_lower_of_equals() {
        let mut sampler = Sampler::new(SamplingOptions::greedy(), 4).unwrap();
        assert_eq!(sampler.sample(&mut [1.0, 4.0, 4.0, 2.0], &[]), 1);
    }

    #[test]
    fn options_out_of_range_are_named() {
        for (change, name) in [
            (
                Box::new(|o: &mut SamplingOptions| o.temperature = -1.0) as Box<dyn FnOnce(&mut _)>,
                "temperature",
            ),
            (Box::new(|o: &mut SamplingOptions| o.temperature = f32::NAN), "temperature"),
            (Box::new(|o: &mut SamplingOptions| o.top_p = 0.0), "top_p"),
            (Box::new(|o: &mut SamplingOptions| o.min_p = 1.5), "min_p"),
            (Box::new(|o: &mut SamplingOptions| o.repetition_penalty = 0.0), "repetition_penalty"),
        ] {
            let error = options(change).check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
