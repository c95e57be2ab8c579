//! Operands that do not fit together.

use crate::format::BlockFormat;

/// Why an operation on blocks was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A row that does not divide into the format's blocks.
    #[error("rows of {columns} do not divide into blocks of {block} for {format}")]
    Columns {
        /// The format.
        format: BlockFormat,
        /// Elements of a row.
        columns: usize,
        /// Elements of a block.
        block: usize,
    },
    /// A buffer of another length than the shape asks for.
    #[error("{what} has {found} elements; expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// By the shape.
        expected: usize,
        /// By the buffer.
        found: usize,
    },
    /// Activations in a form that the weights' format has no kernel for.
    #[error("weights in {format} take {expected} activations")]
    Activations {
        /// The weights' format.
        format: BlockFormat,
        /// The form that it takes.
        expected: &'static str,
    },
}
