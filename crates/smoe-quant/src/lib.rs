//! Block formats, quantization, dot-product kernels and the threads that run them.
//!
//! Every kernel computes in one accumulation order, that of [`kernels::scalar`](crate): the same bits come from every
//! instruction set, from one vector or many, on any number of threads.
//!
//! - Float weights (F32, F16, BF16): 32 lanes. Lane `j` takes the elements `i ≡ j (mod 32)` in increasing order by fused
//!   multiply-add, from zero; a tail is padded with zeros. Lanes are then added by halves: `j + (j + 16)`, 8, 4, 2, 1.
//! - Quantized weights with 8-bit activations: block `b` goes to group `b mod 2` of 8 lanes. In a block, lane `j` is the
//!   exact integer dot of elements `4j..4j + 4`; it is scaled by the product of both scales and added by fused
//!   multiply-add. Then the groups are added lane by lane, and the lanes by halves.

mod activations;
mod block;
mod error;
mod format;
mod kernels;
mod matmul;
mod matrix;
mod pool;

pub use activations::quantize_activations;
pub use block::{dequantize_row, quantize_row};
pub use error::QuantError;
pub use format::{BlockFormat, Q8_BLOCK};
pub use kernels::Kernels;
pub use matmul::matmul;
pub use matrix::{Input, MatrixView};
pub use pool::ThreadPool;
