//! Checkpoint to vault.
