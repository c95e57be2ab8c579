//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves of a head rotated against each other.

use crate::config::{RopeConfig, RopeScaling};

/// Frequencies of one configuration.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    /// Radians per position for each pair of dimensions; half a head long.
    frequencies: Vec<f32>,
    /// Multiplies cosine and sine (YaRN's attention factor).
    magnitude: f32,
}

impl Rope {
    pub(crate) fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let pairs = head_dim / 2;
        let plain = |pair: usize| config.theta.powf(-((2 * pair) as f64) / head_dim as f64);
        let (frequencies, magnitude) = match config.scaling {
            RopeScaling::None => ((0..pairs).map(|pair| plain(pair) as f32).collect(), 1.0),
            RopeScaling::Linear { factor } => {
                ((0..pairs).map(|pair| (plain(pair) / factor) as f32).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                // The dimension that turns the given number of times over the original context.
                let dimension = |rotations: f64| {
                    head_dim as f64 * (original_context / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * config.theta.ln())
                };
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001; // as the reference does, so that the ramp has a slope
                }
                let frequency = |pair: usize| {
                    let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    (plain(pair) / factor * ramp + plain(pair) * (1.0 - ramp)) as f32
                };
                ((0..pairs).map(frequency).collect(), attention_factor as f32)
            }
        };
        Self { frequencies, magnitude }
    }

    /// Number of cosines (and of sines) for one position.
    pub(crate) fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosines, then sines, of one position; `out` is twice [`Rope::pairs`] long.
    ///
    /// The angle is the product in `f32`, as the reference computes it, so that long contexts agree with it.
    pub(crate) fn angles(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.pairs());
        for ((cosine, sine), &frequency) in cosines.iter_mut().zip(sines).zip(&self.frequencies) {
            let angle = f64::from(position as f32 * frequency);
            *cosine = angle.cos() as f32 * self.magnitude;
            *sine = angle.sin() as f32 * self.magnitude;
        }
    }
}

/// Rotates one head by the angles of its position.
pub(crate) fn rotate(head: &mut [f32], angles: &[f32]) {
    let pairs = head.len() / 2;
    let (cosines, sines) = angles.split_at(pairs);
    let (first, second) = head.split_at_mut(pairs);
    for (((x, y), &cosine), &sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*x, *y) = (*x * cosine - *y * sine, *y * cosine + *x * sine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_halves_of_a_head_turn_against_each_other() {
        let rope = Rope::new(&RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }, 4);
        let mut angles = [0.0; 4];
        rope.angles(3, &mut angles);
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, &angles);
        let (a, b) = (3.0f32, 0.03f32);
        let expected = [
            a.cos() - 3.0 * a.sin(),
            2.0 * b.cos() - 4.0 * b.sin(),
            3.0 * a.cos() + a.sin(),
            4.0 * b.cos() + 2.0 * b.sin(),
        ];
        for (found, expected) in head.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let rope = Rope::new(&RopeConfig { theta: 1e6, scaling: RopeScaling::None }, 64);
        let mut angles = [0.0; 64];
        rope.angles(0, &mut angles);
        let mut head: Vec<f32> = (0..64).map(|x| x as f32).collect();
        let before = head.clone();
        rotate(&mut head, &angles);
        assert_eq!(head, before);
    }
}
