//! Likelihood of given texts.

use smoe_model::ModelError;

use crate::engine::Engine;
use crate::error::EngineError;

/// Likelihood of the scored tokens of one sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Sum of negative log-likelihoods in nats.
    pub nll: f64,
    /// Tokens that were scored.
    pub tokens: usize,
}

/// How far one model's next-token distributions are from another's, position by position.
#[derive(Debug, Clone, Default)]
pub struct Divergence {
    /// Kullback-Leibler divergence of this model from the reference, in nats, for each scored position.
    pub kl: Vec<f64>,
    /// Positions where both have the same likeliest token.
    pub same_top1: usize,
}

impl Engine {
    /// Scores `tokens[from..]`, each given all before it. The sequence starts anew.
    ///
    /// # Errors
    /// The tokens do not fit the context, nothing precedes the first scored one, or the model could not go on.
    pub fn score(&mut self, tokens: &[u32], from: usize) -> Result<Score, EngineError> {
        let mut score = Score::default();
        self.each_logits(tokens, from, &mut |target, logits| {
            score.nll += log_sum_exp(logits) - f64::from(logits[target as usize]);
            score.tokens += 1;
        })?;
        Ok(score)
    }

    /// [`Engine::score`], and how far the distributions are from those of `reference`.
    ///
    /// # Errors
    /// As [`Engine::score`], for either model; the vocabularies must have the same size.
    pub fn score_against(
        &mut self,
        reference: &mut Engine,
        tokens: &[u32],
        from: usize,
        divergence: &mut Divergence,
    ) -> Result<Score, EngineError> {
        let vocab_size = self.config().vocab_size;
        self.reset();
        reference.reset();
        let mut score = Score::default();
        let chunk = self.plan().chunk.min(reference.plan().chunk);
        let mut expected = Vec::new();
        for (start, part) in chunks(tokens, chunk) {
            let wanted = wanted(start, part.len(), from, tokens.len());
            expected.clear();
            reference.advance(&part[..wanted.end], wanted.start, None, &mut |_, logits| {
                expected.extend_from_slice(logits);
                Ok(())
            })?;
            let mut rows = expected.chunks_exact(vocab_size);
            self.advance(&part[..wanted.end], wanted.start, None, &mut |index, logits| {
                let Some(expected) = rows.next() else { return Ok(()) };
                score.nll += log_sum_exp(logits) - f64::from(logits[tokens[start + index + 1] as usize]);
                score.tokens += 1;
                divergence.add(expected, logits);
                Ok(())
            })?;
        }
        Ok(score)
    }

    fn each_logits(
        &mut self,
        tokens: &[u32],
        from: usize,
        each: &mut dyn FnMut(u32, &[f32]),
    ) -> Result<(), EngineError> {
        if from == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        let vocab_size = self.config().vocab_size;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(ModelError::TokenId { id, vocab_size }.into());
        }
        self.reset();
        for (start, part) in chunks(tokens, self.plan().chunk) {
            let wanted = wanted(start, part.len(), from, tokens.len());
            self.advance(&part[..wanted.end], wanted.start, None, &mut |index, logits| {
                each(tokens[start + index + 1], logits);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Parts of a sequence with their first positions.
fn chunks(tokens: &[u32], length: usize) -> impl Iterator<Item = (usize, &[u32])> {
    tokens.chunks(length).enumerate().map(move |(index, part)| (index * length, part))
}

/// Indices of a part whose logits predict a scored token: those before `from..`, without the last of all.
fn wanted(start: usize, length: usize, from: usize, total: usize) -> std::ops::Range<usize> {
    let end = if start + length == total { length - 1 } else { length };
    (from - 1).saturating_sub(start).min(end)..end
}

impl Divergence {
    fn add(&mut self, expected: &[f32], found: &[f32]) {
        let (expected_sum, found_sum) = (log_sum_exp(expected), log_sum_exp(found));
        let kl = expected.iter().zip(found).fold(0.0, |kl, (&expected, &found)| {
            let (log_p, log_q) = (f64::from(expected) - expected_sum, f64::from(found) - found_sum);
            kl + log_p.exp() * (log_p - log_q)
        });
        self.kl.push(kl.max(0.0));
        self.same_top1 += usize::from(top1(expected) == top1(found));
    }

    /// Mean of the divergences.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len().max(1) as f64
    }

    /// The divergence that 99 of 100 positions stay below.
    #[must_use]
    pub fn p99(&self) -> f64 {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

fn top1(logits: &[f32]) -> usize {
    logits.iter().enumerate().fold(0, |best, (index, &logit)| if logit > logits[best] { index } else { best })
}

/// `ln(Σ exp(x))` in 64 bits.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    f64::from(max) + sum.ln()
}
