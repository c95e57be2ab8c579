//! Safetensors checkpoints and vaults: untrusted bytes in, checked views out.
