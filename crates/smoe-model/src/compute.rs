//! The processor side of a forward pass: which kernels, on which threads.

use smoe_quant::{Input, Kernels, MatrixView, QuantError, ThreadPool, matmul};

/// Kernels of the chosen instruction set and the threads that run them.
pub struct Compute {
    /// Threads.
    pub pool: ThreadPool,
    /// Instruction set.
    pub kernels: Kernels,
}

impl Compute {
    /// The best instruction set of this processor on the given number of threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { pool: ThreadPool::new(threads), kernels: Kernels::detect() }
    }

    /// `out[token × rows + row] = weights[row] · input[token]`.
    pub(crate) fn matmul(
        &self,
        weights: &MatrixView<'_>,
        input: &Input<'_>,
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), QuantError> {
        matmul(&self.pool, self.kernels, weights, input, tokens, out)
    }
}
