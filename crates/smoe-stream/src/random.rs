//! A small random sequence for probes and fault injection; not for anything that must be unguessable.

/// The splitmix64 finalizer (Steele, Lea, Flood 2014): a bijection of `u64` whose outputs look random.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    #[test]
    fn matches_the_published_sequence() {
        // First outputs of splitmix64 seeded with 1234567 (Rosetta Code's test vector).
        let golden = 0x9E37_79B9_7F4A_7C15_u64;
        let outputs: Vec<u64> =
            (0..3).map(|i: u64| super::mix(1_234_567_u64.wrapping_add(golden.wrapping_mul(i)))).collect();
        assert_eq!(
            outputs,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
