//! Qwen3-MoE (30B-A3B, 235B-A22B and kin).
//!
//! Keys, defaults and arithmetic follow `Qwen3MoeConfig` and `Qwen3MoeForCausalLM` of Hugging Face's `transformers`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Family;
use crate::config::{
    AttentionConfig, ConfigOptions, FeedForward, HeadTying, ModelConfig, RopeScaling, RouterConfig,
    RouterScore, limits,
};
use crate::config_keys::Keys;
use crate::error::ConfigError;
use crate::rope_keys::rope;
use crate::tensors::{Assignment, ExpertLayerPlan, ExpertSource, SourceTensor, TensorPlan, WeightClass};

pub(crate) const FAMILY: Family =
    Family { name: "qwen3_moe", architecture: "Qwen3MoeForCausalLM", config, tensors };

/// Keys that say nothing about the logits: training, bookkeeping, tokens that other files decide.
const HARMLESS: &[&str] = &[
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    // Read by other families' sliding windows only.
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

fn config(mut keys: Keys, options: &ConfigOptions) -> Result<ModelConfig, ConfigError> {
    let hidden_size = keys.need_count("hidden_size", None, 1, limits::WIDTH)?;
    let vocab_size = keys.need_count("vocab_size", None, 1, limits::VOCABULARY)?;
    let layer_count = keys.need_count("num_hidden_layers", None, 1, limits::LAYERS)?;
    let context_length = keys.count("max_position_embeddings", None, 1, limits::CONTEXT)?.unwrap_or(32_768);
    let rms_norm_eps = keys.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let attention = attention(&mut keys, hidden_size)?;
    let rope = rope(&mut keys, context_length)?;
    let (layers, router) = feed_forward(&mut keys, layer_count)?;
    activation(&mut keys)?;
    let head = match keys.flag("tie_word_embeddings")? {
        Some(true) => HeadTying::Tied,
        Some(false) => HeadTying::Untied,
        None => HeadTying::ByTensors,
    };
    if let Some(value) = keys.take("quantization_config") {
        return Err(keys.unsupported(
            "quantization_config",
            &value,
            "checkpoints in F32, F16 or BF16 are; take the original one",
        ));
    }
    keys.finish(HARMLESS, &options.ignored_keys)?;
    // A scaled rotary embedding reaches as far as its factor says, also where the length was left as trained.
    let context_length = match rope.scaling {
        RopeScaling::Yarn { factor, original_context, .. } => {
            context_length.max((factor * original_context) as usize).min(limits::CONTEXT)
        }
        _ => context_length,
    };
    Ok(ModelConfig {
        family: FAMILY.name,
        vocab_size,
        hidden_size,
        rms_norm_eps,
        attention,
        rope,
        router,
        layers,
        head,
        context_length,
    })
}

fn attention(keys: &mut Keys, hidden_size: usize) -> Result<AttentionConfig, ConfigError> {
    let heads = keys.need_count("num_attention_heads", None, 1, limits::HEADS)?;
    let kv_heads = keys.count("num_key_value_heads", None, 1, limits::HEADS)?.unwrap_or(4);
    if heads % kv_heads != 0 || heads / kv_heads > limits::QUERIES_PER_KV_HEAD {
        return Err(keys.invalid(
            "num_key_value_heads",
            format!(
                "a divisor of num_attention_heads = {heads} with at most {} queries for each",
                limits::QUERIES_PER_KV_HEAD
            ),
            &Value::from(kv_heads),
        ));
    }
    let head_dim = match keys.count("head_dim", None, 2, limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None => hidden_size / heads,
    };
    if head_dim == 0 || head_dim % 2 != 0 || head_dim > limits::HEAD_DIM {
        return Err(keys.invalid(
            "head_dim",
            format!("an even number up to {}", limits::HEAD_DIM),
            &Value::from(head_dim),
        ));
    }
    let bias = keys.flag("attention_bias")?.unwrap_or(false);
    let use_window = keys.flag("use_sliding_window")?.unwrap_or(false);
    let window = match keys.has("sliding_window") {
        true => keys.count("sliding_window", None, 1, limits::CONTEXT)?,
        // Absent is the default width, null is none.
        false => if_absent(keys, "sliding_window", 4_096),
    };
    layer_types(keys, use_window)?;
    Ok(AttentionConfig { heads, kv_heads, head_dim, bias, window: window.filter(|_| use_window) })
}

/// The default of a key that is absent rather than null.
fn if_absent(keys: &mut Keys, key: &str, default: usize) -> Option<usize> {
    if keys.remove_null(key) { None } else { Some(default) }
}

/// A list of attention kinds per layer must say what the other keys say.
fn layer_types(keys: &mut Keys, use_window: bool) -> Result<(), ConfigError> {
    let Some(value) = keys.take("layer_types") else { return Ok(()) };
    let expected = if use_window { "sliding_attention" } else { "full_attention" };
    let agrees =
        value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind.as_str() == Some(expected)));
    if agrees {
        Ok(())
    } else {
        Err(keys.unsupported("layer_types", &value, format!("every layer as {expected} is")))
    }
}

/// The kind of each layer and the router of the sparse ones.
fn feed_forward(
    keys: &mut Keys,
    layer_count: usize,
) -> Result<(Vec<FeedForward>, RouterConfig), ConfigError> {
    let experts = keys.need_count("num_experts", Some("num_local_experts"), 0, limits::EXPERTS)?;
    let top_k = keys.need_count("num_experts_per_tok", None, 1, limits::TOP_K)?;
    let renormalize = keys.flag("norm_topk_prob")?.unwrap_or(false);
    let moe_intermediate = keys.need_count("moe_intermediate_size", None, 1, limits::WIDTH)?;
    let dense_intermediate = keys.count("intermediate_size", None, 1, limits::WIDTH)?.unwrap_or(6_144);
    let step = keys.count("decoder_sparse_step", None, 1, limits::LAYERS)?.unwrap_or(1);
    let dense_layers = keys.indices("mlp_only_layers", layer_count)?.unwrap_or_default();
    if let Some(value) = keys.take("scoring_func")
        && value.as_str() != Some("softmax")
    {
        return Err(keys.unsupported("scoring_func", &value, "softmax is"));
    }
    let layers: Vec<_> = (0..layer_count)
        .map(|layer| {
            if experts > 0 && !dense_layers.contains(&layer) && (layer + 1) % step == 0 {
                FeedForward::Sparse { intermediate: moe_intermediate }
            } else {
                FeedForward::Dense { intermediate: dense_intermediate }
            }
        })
        .collect();
    let any_sparse = layers.iter().any(|layer| matches!(layer, FeedForward::Sparse { .. }));
    if any_sparse && top_k > experts {
        return Err(ConfigError::Contradiction(format!(
            "num_experts_per_tok is {top_k}, but there are only {experts} experts"
        )));
    }
    Ok((layers, RouterConfig { score: RouterScore::Softmax, experts, top_k, renormalize }))
}

fn activation(keys: &mut Keys) -> Result<(), ConfigError> {
    match keys.text("hidden_act")?.as_deref() {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(keys.unsupported("hidden_act", &Value::from(other), "silu is")),
    }
}

fn tensors(
    config: &ModelConfig,
    tensors: &BTreeMap<String, SourceTensor>,
) -> Result<TensorPlan, ConfigError> {
    let mut assignment = Assignment::new(tensors);
    let hidden = config.hidden_size;
    assignment.matrix(
        "model.embed_tokens.weight".into(),
        config.vocab_size,
        hidden,
        WeightClass::Dense,
        "the embedding table",
    )?;
    for (layer, &kind) in config.layers.iter().enumerate() {
        attention_tensors(&mut assignment, config, layer)?;
        feed_forward_tensors(&mut assignment, config, layer, kind)?;
    }
    assignment.vector("model.norm.weight".into(), hidden, WeightClass::Norm, "the final norm")?;
    head_tensor(&mut assignment, config)?;
    finish(assignment)
}

fn attention_tensors(
    assignment: &mut Assignment<'_>,
    config: &ModelConfig,
    layer: usize,
) -> Result<(), ConfigError> {
    let AttentionConfig { heads, kv_heads, head_dim, bias, .. } = config.attention;
    let hidden = config.hidden_size;
    let prefix = format!("model.layers.{layer}");
    let norm = |assignment: &mut Assignment<'_>, name: &str, length| {
        assignment.vector(
            format!("{prefix}.{name}.weight"),
            length,
            WeightClass::Norm,
            "a norm of every layer",
        )
    };
    norm(assignment, "input_layernorm", hidden)?;
    let projections = [
        ("q_proj", heads * head_dim, hidden),
        ("k_proj", kv_heads * head_dim, hidden),
        ("v_proj", kv_heads * head_dim, hidden),
        ("o_proj", hidden, heads * head_dim),
    ];
    for (name, rows, columns) in projections {
        let weight = format!("{prefix}.self_attn.{name}.weight");
        assignment.matrix(weight, rows, columns, WeightClass::Dense, "a projection of every attention")?;
        if bias {
            let bias = format!("{prefix}.self_attn.{name}.bias");
            assignment.vector(bias, rows, WeightClass::Bias, "attention_bias is true")?;
        }
    }
    norm(assignment, "self_attn.q_norm", head_dim)?;
    norm(assignment, "self_attn.k_norm", head_dim)?;
    norm(assignment, "post_attention_layernorm", hidden)
}

fn feed_forward_tensors(
    assignment: &mut Assignment<'_>,
    config: &ModelConfig,
    layer: usize,
    kind: FeedForward,
) -> Result<(), ConfigError> {
    let hidden = config.hidden_size;
    let prefix = format!("model.layers.{layer}.mlp");
    match kind {
        FeedForward::Dense { intermediate } => {
            let why = "mlp_only_layers and decoder_sparse_step make this layer dense";
            for (name, rows, columns) in
                [("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate)]
            {
                let weight = format!("{prefix}.{name}_proj.weight");
                assignment.matrix(weight, rows, columns, WeightClass::Dense, why)?;
            }
            Ok(())
        }
        FeedForward::Sparse { intermediate } => {
            let experts = config.router.experts;
            let gate = format!("{prefix}.gate.weight");
            assignment.matrix(gate, experts, hidden, WeightClass::Router, "the router of a sparse layer")?;
            let fused = format!("{prefix}.experts.gate_up_proj");
            let source = if assignment.has(&fused) {
                let down = format!("{prefix}.experts.down_proj");
                let why = "experts of a sparse layer, fused";
                assignment.take(&fused, &[experts, 2 * intermediate, hidden], why)?;
                assignment.take(&down, &[experts, hidden, intermediate], why)?;
                ExpertSource::Fused { gate_up: fused, down }
            } else {
                ExpertSource::Separate { prefix: format!("{prefix}.experts.") }
            };
            let plan = ExpertLayerPlan { layer, experts, intermediate, hidden, source };
            if matches!(plan.source, ExpertSource::Separate { .. }) {
                for part in (0..experts).flat_map(|expert| plan.parts(expert)) {
                    assignment.take(
                        &part.tensor,
                        &[part.rows, part.columns],
                        "an expert of a sparse layer",
                    )?;
                }
            }
            assignment.plan.expert_layers.push(plan);
            Ok(())
        }
    }
}

/// The flag and the tensors must agree on whether the head is the embedding table.
fn head_tensor(assignment: &mut Assignment<'_>, config: &ModelConfig) -> Result<(), ConfigError> {
    const HEAD: &str = "lm_head.weight";
    let tied = match config.head {
        HeadTying::Tied => true,
        HeadTying::Untied => false,
        HeadTying::ByTensors => !assignment.has(HEAD),
    };
    if !tied {
        let why = "tie_word_embeddings is false, so the head has a tensor of its own";
        return assignment.matrix(
            HEAD.into(),
            config.vocab_size,
            config.hidden_size,
            WeightClass::Dense,
            why,
        );
    }
    if assignment.has(HEAD) {
        let why = "tie_word_embeddings is true";
        assignment.take(HEAD, &[config.vocab_size, config.hidden_size], why)?;
        assignment.plan.ignored.push((HEAD.into(), "a copy of the embedding table, which is tied".into()));
        assignment.plan.must_equal.push((HEAD.into(), "model.embed_tokens.weight".into()));
    }
    Ok(())
}

/// Buffers that older versions saved are recomputed; anything else must have been used.
fn finish(mut assignment: Assignment<'_>) -> Result<TensorPlan, ConfigError> {
    let buffers: Vec<_> = assignment.unused().filter(|name| name.ends_with(".rotary_emb.inv_freq")).collect();
    for name in buffers {
        assignment.ignore(name, "recomputed from the configuration");
    }
    let unused: Vec<_> = assignment.unused().collect();
    if unused.is_empty() {
        return Ok(assignment.plan);
    }
    const NAMES_SHOWN: usize = 5;
    let hint = if unused.iter().any(|name| name.contains("self_attn") && name.ends_with(".bias")) {
        "attention_bias is false but biases exist"
    } else if unused.iter().any(|name| name.contains("shared_expert")) {
        "this family has no shared experts"
    } else {
        "check that config.json belongs to these weights"
    };
    Err(ConfigError::UnusedTensors {
        count: unused.len(),
        family: FAMILY.name,
        names: unused.iter().take(NAMES_SHOWN).copied().collect::<Vec<_>>().join(", "),
        hint: hint.into(),
    })
}
