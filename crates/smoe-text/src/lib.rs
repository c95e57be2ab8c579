//! Between text and tokens: tokenizer, incremental decoding, chat templates.
//!
//! Files of a checkpoint are untrusted here: a tokenizer that cannot be used is an error, and a chat template is a program
//! from a stranger that runs with bounded work, memory and depth.

mod allocator;
mod chat;
mod decode;
mod error;
mod files;
mod guard;
mod template;
mod tojson;
mod tokenizer;

pub use allocator::BudgetAllocator;
pub use chat::{ChatInput, Message, encode_chat};
pub use decode::IncrementalDecoder;
pub use error::TextError;
pub use files::TextFiles;
pub use template::ChatTemplate;
#[doc(hidden)]
pub use template::render_for_tests;
pub use tokenizer::Tokenizer;
