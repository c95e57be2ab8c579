//! Model families: which parts go where and how a checkpoint calls them.

mod qwen3_moe;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::config::{ConfigOptions, ModelConfig};
use crate::config_keys::Keys;
use crate::error::ConfigError;
use crate::tensors::{SourceTensor, TensorPlan};

/// What a family provides.
pub(crate) struct Family {
    /// `model_type` in configurations.
    pub(crate) name: &'static str,
    /// The entry of `architectures`.
    pub(crate) architecture: &'static str,
    /// Reads the rest of the configuration.
    pub(crate) config: fn(Keys, &ConfigOptions) -> Result<ModelConfig, ConfigError>,
    /// Assigns a checkpoint's tensors.
    pub(crate) tensors: fn(&ModelConfig, &BTreeMap<String, SourceTensor>) -> Result<TensorPlan, ConfigError>,
}

/// All families, by name.
const FAMILIES: &[Family] = &[qwen3_moe::FAMILY];

/// The family that a configuration names; takes `architectures` and `model_type`.
pub(crate) fn of(keys: &mut Keys) -> Result<&'static Family, ConfigError> {
    let model_type = keys.text("model_type")?;
    let architecture = match keys.take("architectures") {
        None => None,
        Some(Value::Array(items)) if items.len() == 1 && items[0].is_string() => {
            items[0].as_str().map(str::to_owned)
        }
        Some(other) => return Err(keys.invalid("architectures", "a list with one name", &other)),
    };
    let found = match (&architecture, &model_type) {
        (Some(architecture), Some(model_type)) => format!("{architecture} (model_type {model_type})"),
        (Some(name), None) | (None, Some(name)) => name.clone(),
        (None, None) => {
            return Err(ConfigError::Missing {
                key: "architectures (or model_type)".into(),
                expected: supported(),
            });
        }
    };
    FAMILIES
        .iter()
        .find(|family| {
            architecture.as_deref().is_none_or(|name| name == family.architecture)
                && model_type.as_deref().is_none_or(|name| name == family.name)
        })
        .ok_or_else(|| ConfigError::UnknownArchitecture { found, supported: supported() })
}

/// The family of a checked configuration.
pub(crate) fn by_name(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

fn supported() -> String {
    FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ")
}
