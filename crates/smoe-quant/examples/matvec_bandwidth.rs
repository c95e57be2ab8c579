//! How close matrix-vector products come to what memory delivers.
//!
//! A decoded token multiplies every weight once, so weight bytes per second are the measure and plain reading is the
//! ceiling. Matrices of an expert's shape are taken in turn from a region larger than any cache; ceiling and kernels are
//! measured alternately in one run.
//!
//!     cargo run --release -p smoe-quant --example matvec_bandwidth -- [threads] [MiB]

use std::hint::black_box;
use std::time::Instant;

use smoe_quant::{
    BlockFormat, Input, Kernels, MatrixView, Q8_BLOCK, ThreadPool, matmul, quantize_activations,
};

const ROWS: usize = 768;
const COLUMNS: usize = 2048;
const ROUNDS: usize = 7;

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a number"));
    let threads = args.next().unwrap_or(1);
    let region = args.next().unwrap_or(512) << 20;
    let pool = ThreadPool::new(threads);
    let kernels = Kernels::detect();
    // Small finite values in every format: bytes below 60 are such as floats, and as scales.
    let bytes: Vec<u8> = (0..region).map(|index| (index * 7 % 59) as u8).collect();
    let x: Vec<f32> = (0..COLUMNS).map(|index| (index % 17) as f32 - 8.0).collect();
    let (mut quants, mut scales) = (vec![0; COLUMNS], vec![0.0; COLUMNS / Q8_BLOCK]);
    quantize_activations(&x, &mut quants, &mut scales);
    println!(
        "{} on {threads} threads, {ROWS} × {COLUMNS}, {} MiB, GB/s: median (least to most)",
        kernels.name(),
        region >> 20
    );

    let mut results: Vec<(String, Vec<f64>)> = vec![("read".into(), Vec::new())];
    results.extend(BlockFormat::ALL.iter().map(|format| (format.name().to_owned(), Vec::new())));
    for _ in 0..ROUNDS {
        results[0].1.push(rate(region, || read(&pool, &bytes)));
        for (index, &format) in BlockFormat::ALL.iter().enumerate() {
            let matrix_bytes = format.row_bytes(COLUMNS).expect("whole blocks") * ROWS;
            let matrices: Vec<_> = bytes
                .chunks_exact(matrix_bytes)
                .map(|bytes| MatrixView::new(format, ROWS, COLUMNS, bytes).expect("a matrix"))
                .collect();
            let input = match format.uses_q8_activations() {
                true => Input::Q8 { quants: &quants, scales: &scales },
                false => Input::F32(&x),
            };
            let mut out = vec![0.0; ROWS];
            results[index + 1].1.push(rate(matrices.len() * matrix_bytes, || {
                for matrix in &matrices {
                    matmul(&pool, kernels, matrix, &input, 1, &mut out).expect("shapes fit");
                }
                black_box(&out);
            }));
        }
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let ceiling = median(&mut results[0].1.clone());
    for (name, mut rates) in results {
        let median = median(&mut rates);
        println!(
            "{name:>5} {median:6.1} ({:.1} to {:.1}), {:.0} % of reading",
            rates[0],
            rates[rates.len() - 1],
            100.0 * median / ceiling
        );
    }
}

/// Bytes per second in units of 10^9.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    let started = Instant::now();
    work();
    bytes as f64 / started.elapsed().as_secs_f64() / 1e9
}

fn read(pool: &ThreadPool, bytes: &[u8]) {
    const PART: usize = 1 << 20;
    pool.run(bytes.len() / PART, &|part| {
        let mut lanes = [0_u64; 8];
        for line in bytes[part * PART..(part + 1) * PART].as_chunks::<64>().0 {
            for (lane, word) in lanes.iter_mut().zip(line.as_chunks::<8>().0) {
                *lane = lane.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        black_box(lanes);
    });
}
