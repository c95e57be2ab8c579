//! Rotary embedding keys, in both spellings that configurations use.

use serde_json::Value;

use crate::config::{RopeConfig, RopeScaling, limits};
use crate::config_keys::Keys;
use crate::error::ConfigError;

/// Base of the frequencies where no key names one (the reference implementation's default).
const DEFAULT_THETA: f64 = 10_000.0;
/// YaRN's defaults, from section 3.2 of the paper.
const BETA_FAST: f64 = 32.0;
const BETA_SLOW: f64 = 1.0;

/// Reads `rope_theta`, `rope_scaling` and `rope_parameters`.
///
/// `rope_parameters` is the newer spelling of `rope_scaling` and holds `rope_theta` too; both at once must agree.
/// Inside, `rope_type` is the newer spelling of `type`.
pub(crate) fn rope(keys: &mut Keys, context: usize) -> Result<RopeConfig, ConfigError> {
    let outer_theta = keys.positive("rope_theta")?;
    let outer_original = keys.count("original_max_position_embeddings", None, 1, limits::CONTEXT)?;
    let scaling = keys.take("rope_scaling");
    let parameters = keys.take("rope_parameters");
    let (key, value) = match (scaling, parameters) {
        (Some(a), Some(b)) if without_theta(&a) != without_theta(&b) => {
            return Err(ConfigError::Contradiction(
                "rope_scaling and rope_parameters are both given and differ".into(),
            ));
        }
        (_, Some(value)) => ("rope_parameters", value),
        (Some(value), None) => ("rope_scaling", value),
        (None, None) => {
            return Ok(RopeConfig {
                theta: outer_theta.unwrap_or(DEFAULT_THETA),
                scaling: RopeScaling::None,
            });
        }
    };
    keys.put(key, value);
    let Some(mut inner) = keys.object(key)? else {
        return Ok(RopeConfig { theta: outer_theta.unwrap_or(DEFAULT_THETA), scaling: RopeScaling::None });
    };
    let inner_theta = inner.positive("rope_theta")?;
    if let (Some(a), Some(b)) = (outer_theta, inner_theta)
        && a != b
    {
        return Err(ConfigError::Contradiction(format!("rope_theta is {a}, but {key}.rope_theta is {b}")));
    }
    let theta = inner_theta.or(outer_theta).unwrap_or(DEFAULT_THETA);
    if theta <= 1.0 {
        return Err(keys.invalid("rope_theta", "a number greater than 1", &Value::from(theta)));
    }
    whole_head(&mut inner)?;
    let scaling = scaling_of(&mut inner, key, context, outer_original)?;
    inner.finish(&[], &[])?;
    Ok(RopeConfig { theta, scaling })
}

/// A copy without what only one of the spellings holds.
fn without_theta(value: &Value) -> Value {
    let mut value = value.clone();
    if let Value::Object(map) = &mut value {
        map.remove("rope_theta");
        if let Some(kind) = map.remove("type") {
            map.entry("rope_type").or_insert(kind);
        }
    }
    value
}

/// A rotation of a part of the head only is another family's.
fn whole_head(inner: &mut Keys) -> Result<(), ConfigError> {
    match inner.take("partial_rotary_factor") {
        Some(value) if value.as_f64() != Some(1.0) => {
            Err(inner.unsupported("partial_rotary_factor", &value, "this family rotates the whole head"))
        }
        _ => Ok(()),
    }
}

fn scaling_of(
    inner: &mut Keys,
    key: &str,
    context: usize,
    outer_original: Option<usize>,
) -> Result<RopeScaling, ConfigError> {
    let new_name = inner.text("rope_type")?;
    let old_name = inner.text("type")?;
    if let (Some(a), Some(b)) = (&new_name, &old_name)
        && a != b
    {
        return Err(ConfigError::Contradiction(format!("{key}.rope_type is {a} and {key}.type is {b}")));
    }
    let kind = new_name.or(old_name).unwrap_or_else(|| "default".into());
    match kind.as_str() {
        "default" => Ok(RopeScaling::None),
        "linear" => {
            // A configuration edited for long contexts may name the length it was trained with; this type does not use it.
            inner.count("original_max_position_embeddings", None, 1, limits::CONTEXT)?;
            let factor = inner.positive("factor")?.ok_or_else(|| ConfigError::Missing {
                key: format!("{key}.factor"),
                expected: "a number greater than 0".into(),
            })?;
            Ok(RopeScaling::Linear { factor })
        }
        "yarn" => yarn(inner, context, outer_original),
        _ => Err(inner.unsupported("rope_type", &Value::from(kind), "default, linear and yarn are")),
    }
}

/// YaRN's keys with the reference implementation's rules for what is absent.
fn yarn(inner: &mut Keys, context: usize, outer_original: Option<usize>) -> Result<RopeScaling, ConfigError> {
    let original = inner.count("original_max_position_embeddings", None, 1, limits::CONTEXT)?;
    let original_context = outer_original.or(original).unwrap_or(context) as f64;
    let factor = inner.positive("factor")?.unwrap_or(context as f64 / original_context);
    let beta_fast = inner.positive("beta_fast")?.unwrap_or(BETA_FAST);
    let beta_slow = inner.positive("beta_slow")?.unwrap_or(BETA_SLOW);
    let truncate = inner.flag("truncate")?.unwrap_or(true);
    let mscale = inner.number("mscale")?.filter(|&value| value != 0.0);
    let mscale_all_dim = inner.number("mscale_all_dim")?.filter(|&value| value != 0.0);
    let attention_factor = match (inner.positive("attention_factor")?, mscale, mscale_all_dim) {
        (Some(given), _, _) => given,
        (None, Some(mscale), Some(all)) => magnitude(factor, mscale) / magnitude(factor, all),
        _ => magnitude(factor, 1.0),
    };
    Ok(RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow, truncate })
}

/// The attention temperature that the paper recommends for a scale.
fn magnitude(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}
