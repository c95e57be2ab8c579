//! From a checkpoint's tensors to a model's weights: every tensor is used or ignored for a stated reason.

use std::collections::BTreeMap;

use crate::config::ModelConfig;
use crate::error::ConfigError;
use crate::family;

/// A tensor as a checkpoint describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceTensor {
    /// Element type by its safetensors name ("BF16").
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
}

/// What a resident tensor is for; it decides in which format it is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightClass {
    /// A norm's weights; stays as it is.
    Norm,
    /// A router gate; stays as it is.
    Router,
    /// A projection's bias; stays as it is.
    Bias,
    /// A matrix that follows the dense format.
    Dense,
}

/// A tensor that stays in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResidentTensor {
    /// Name in the vault and in the checkpoint.
    pub name: String,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns: the length of a row.
    pub columns: usize,
    /// What it is for.
    pub class: WeightClass,
}

/// Rows `first_row..first_row + rows` of a checkpoint's tensor seen as a matrix of `columns` columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRows {
    /// The tensor's name.
    pub tensor: String,
    /// The first row, counted over all dimensions but the last.
    pub first_row: u64,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
}

/// Where the experts of a layer are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertSource {
    /// Three tensors for each expert: `{prefix}{expert}.{gate,up,down}_proj.weight`.
    Separate {
        /// What stands before the expert's number.
        prefix: String,
    },
    /// Two tensors for all: gate over up `[experts, 2 × intermediate, hidden]`, down `[experts, hidden, intermediate]`.
    Fused {
        /// Gate over up.
        gate_up: String,
        /// Down.
        down: String,
    },
}

/// The experts of one sparse layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLayerPlan {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Number of experts.
    pub experts: usize,
    /// Rows of gate and up, columns of down.
    pub intermediate: usize,
    /// Columns of gate and up, rows of down.
    pub hidden: usize,
    /// Where they are.
    pub source: ExpertSource,
}

impl ExpertLayerPlan {
    /// Gate, up and down of one expert, in this order.
    #[must_use]
    pub fn parts(&self, expert: usize) -> [SourceRows; 3] {
        let (intermediate, hidden) = (self.intermediate, self.hidden);
        match &self.source {
            ExpertSource::Separate { prefix } => {
                let part = |name: &str, rows, columns| SourceRows {
                    tensor: format!("{prefix}{expert}.{name}_proj.weight"),
                    first_row: 0,
                    rows,
                    columns,
                };
                [
                    part("gate", intermediate, hidden),
                    part("up", intermediate, hidden),
                    part("down", hidden, intermediate),
                ]
            }
            ExpertSource::Fused { gate_up, down } => {
                let part = |tensor: &String, first_row: usize, rows, columns| SourceRows {
                    tensor: tensor.clone(),
                    first_row: first_row as u64,
                    rows,
                    columns,
                };
                let first = expert * 2 * intermediate;
                [
                    part(gate_up, first, intermediate, hidden),
                    part(gate_up, first + intermediate, intermediate, hidden),
                    part(down, expert * hidden, hidden, intermediate),
                ]
            }
        }
    }
}

/// Where everything goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TensorPlan {
    /// Resident tensors, in the order of their use.
    pub resident: Vec<ResidentTensor>,
    /// Sparse layers, in order.
    pub expert_layers: Vec<ExpertLayerPlan>,
    /// Tensors that are not packed, with the reason.
    pub ignored: Vec<(String, String)>,
    /// Pairs of tensors that must hold the same bytes, else the checkpoint contradicts itself.
    pub must_equal: Vec<(String, String)>,
}

/// Assigns every tensor of a checkpoint.
///
/// # Errors
/// [`ConfigError`] names a tensor that is missing, has another shape or type than the configuration says, or is not used.
pub fn plan_tensors(
    config: &ModelConfig,
    tensors: &BTreeMap<String, SourceTensor>,
) -> Result<TensorPlan, ConfigError> {
    match family::by_name(config.family) {
        Some(family) => (family.tensors)(config, tensors),
        None => Err(ConfigError::UnknownArchitecture {
            found: config.family.into(),
            supported: "a configuration read by this version".into(),
        }),
    }
}

/// Takes a checkpoint's tensors one by one and knows at the end what was not used.
pub(crate) struct Assignment<'a> {
    tensors: &'a BTreeMap<String, SourceTensor>,
    used: std::collections::BTreeSet<&'a str>,
    pub(crate) plan: TensorPlan,
}

impl<'a> Assignment<'a> {
    pub(crate) fn new(tensors: &'a BTreeMap<String, SourceTensor>) -> Self {
        Self { tensors, used: Default::default(), plan: TensorPlan::default() }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Marks a tensor of the given shape as used.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize], why: &str) -> Result<(), ConfigError> {
        let expected = || format!("{shape:?}");
        let Some((key, tensor)) = self.tensors.get_key_value(name) else {
            return Err(ConfigError::MissingTensor {
                name: name.into(),
                why: why.into(),
                expected: expected(),
            });
        };
        if !tensor.shape.iter().copied().eq(shape.iter().map(|&length| length as u64)) {
            return Err(ConfigError::Shape {
                name: name.into(),
                expected: expected(),
                found: format!("{:?}", tensor.shape),
            });
        }
        if !matches!(tensor.dtype.as_str(), "F32" | "F16" | "BF16") {
            return Err(ConfigError::Dtype { name: name.into(), found: tensor.dtype.clone() });
        }
        self.used.insert(key);
        Ok(())
    }

    /// A resident matrix.
    pub(crate) fn matrix(
        &mut self,
        name: String,
        rows: usize,
        columns: usize,
        class: WeightClass,
        why: &str,
    ) -> Result<(), ConfigError> {
        self.take(&name, &[rows, columns], why)?;
        self.plan.resident.push(ResidentTensor { name, rows, columns, class });
        Ok(())
    }

    /// A resident vector.
    pub(crate) fn vector(
        &mut self,
        name: String,
        length: usize,
        class: WeightClass,
        why: &str,
    ) -> Result<(), ConfigError> {
        self.take(&name, &[length], why)?;
        self.plan.resident.push(ResidentTensor { name, rows: 1, columns: length, class });
        Ok(())
    }

    /// Leaves a tensor out, for a reason.
    pub(crate) fn ignore(&mut self, name: &str, reason: &str) {
        if let Some((key, _)) = self.tensors.get_key_value(name)
            && self.used.insert(key)
        {
            self.plan.ignored.push((name.into(), reason.into()));
        }
    }

    /// Names of tensors that nothing has used so far.
    pub(crate) fn unused(&self) -> impl Iterator<Item = &'a str> {
        self.tensors.keys().map(String::as_str).filter(|name| !self.used.contains(name))
    }
}
