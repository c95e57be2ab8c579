//! Tokenizer, incremental decoding and chat templates.
