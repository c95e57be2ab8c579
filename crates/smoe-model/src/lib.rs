//! From a model's configuration to logits.
//!
//! The crate knows what a transformer with routed experts computes. It opens no files: resident weights arrive in a
//! buffer, experts through an [`smoe_stream::ExpertStream`]. A family file (see `family/`) only says which parts go
//! where and how a checkpoint calls them.

mod attention;
mod compute;
mod config;
mod config_keys;
mod error;
mod family;
mod instruments;
mod kv_cache;
mod model;
mod moe;
mod ops;
mod rope;
mod rope_keys;
mod scratch;
mod tensors;
mod weights;

pub use compute::Compute;
pub use config::{
    AttentionConfig, ConfigOptions, FeedForward, HeadTying, ModelConfig, RopeConfig, RopeScaling,
    RouterConfig, RouterScore,
};
pub use error::{ConfigError, ModelError};
pub use instruments::{Bucket, Instruments};
pub use kv_cache::{KvCache, KvFormat};
pub use model::{Model, ModelState, OnLogits, Run, StateOptions, StreamedLayer};
pub use tensors::{
    ExpertLayerPlan, ExpertSource, ResidentTensor, SourceRows, SourceTensor, TensorPlan, WeightClass,
    plan_tensors,
};
pub use weights::{RecordLayout, RecordPart, ResidentWeights, WeightEntry};
