//! Configurations as people write them, and tensors that do or do not belong to them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;

use serde_json::{Value, json};
use smoe_model::{
    ConfigOptions, FeedForward, HeadTying, ModelConfig, RopeScaling, SourceTensor, plan_tensors,
};

fn base() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": false,
    })
}

fn with(changes: Value) -> Value {
    let mut config = base();
    let Value::Object(changes) = changes else { panic!("an object") };
    for (key, value) in changes {
        config[key] = value;
    }
    config
}

fn without(key: &str) -> Value {
    let mut config = base();
    config.as_object_mut().unwrap().remove(key);
    config
}

fn parse(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_json(&config.to_string(), &ConfigOptions::default()).map_err(|error| error.to_string())
}

fn refused(config: &Value, words: &[&str]) {
    let error = parse(config).expect_err("is refused");
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn both_spellings_mean_the_same() {
    let mut new = with(json!({"num_local_experts": 8, "dtype": "bfloat16"}));
    let map = new.as_object_mut().unwrap();
    map.remove("num_experts");
    map.remove("torch_dtype");
    map.remove("rope_theta");
    new["rope_parameters"] = json!({"rope_theta": 10000.0, "rope_type": "default"});
    assert_eq!(parse(&new), parse(&base()));
}

#[test]
fn yarn_in_both_spellings() {
    let old = with(
        json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    );
    let mut new = without("rope_theta");
    new["rope_parameters"] = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0});
    let config = parse(&old).unwrap();
    assert_eq!(Ok(config.clone()), parse(&new));
    let RopeScaling::Yarn { attention_factor, original_context, .. } = config.rope.scaling else {
        panic!("yarn")
    };
    assert!((attention_factor - (0.1 * 4.0f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!(original_context, 128.0);
}

#[test]
fn a_scaled_embedding_reaches_as_far_as_it_says() {
    let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512});
    assert_eq!(parse(&with(json!({"rope_scaling": scaling}))).unwrap().context_length, 2048);
}

#[test]
fn keys_that_would_change_the_result_are_refused_by_name() {
    for (changes, words) in [
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            &["rope_scaling.rope_type", "dynamic"][..],
        ),
        (json!({"rope_scaling": {"type": "longrope"}}), &["rope_scaling.rope_type", "longrope"]),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "new_key": 1}}),
            &["rope_scaling.new_key"],
        ),
        (json!({"rope_scaling": {"rope_type": "linear"}}), &["rope_scaling.factor", "missing"]),
        (
            json!({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
            &["partial_rotary_factor"],
        ),
        (json!({"rope_parameters": {"rope_theta": 5e5}}), &["rope_theta", "500000"]),
        (json!({"hidden_act": "gelu"}), &["hidden_act", "gelu"]),
        (json!({"quantization_config": {"quant_method": "fp8"}}), &["quantization_config", "fp8"]),
        (json!({"scoring_func": "sigmoid"}), &["scoring_func", "sigmoid"]),
        (json!({"n_shared_experts": 1}), &["n_shared_experts", "unknown key"]),
        (json!({"layer_types": ["full_attention", "linear_attention"]}), &["layer_types"]),
        (json!({"num_local_experts": 9}), &["num_experts is 8", "num_local_experts is 9"]),
        (
            json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
            &["LlamaForCausalLM", "Qwen3MoeForCausalLM"],
        ),
        (json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen2_moe"}), &["qwen2_moe"]),
    ] {
        refused(&with(changes), words);
    }
}

#[test]
fn values_that_make_no_model_are_refused_by_name() {
    for (changes, words) in [
        (json!({"num_experts_per_tok": 9}), &["num_experts_per_tok is 9"][..]),
        (json!({"num_key_value_heads": 3}), &["num_key_value_heads", "3"]),
        (json!({"head_dim": 31}), &["head_dim", "31"]),
        (json!({"head_dim": 100_000}), &["head_dim"]),
        (json!({"hidden_size": 0}), &["hidden_size"]),
        (json!({"hidden_size": -4}), &["hidden_size", "-4"]),
        (json!({"hidden_size": 1e300}), &["hidden_size"]),
        (json!({"hidden_size": "64"}), &["hidden_size", "\"64\""]),
        (json!({"num_hidden_layers": 100_000_000}), &["num_hidden_layers"]),
        (json!({"vocab_size": 18_446_744_073_709_551_615u64}), &["vocab_size"]),
        (json!({"rms_norm_eps": 0}), &["rms_norm_eps"]),
        (json!({"rope_theta": -1.0}), &["rope_theta"]),
        (json!({"mlp_only_layers": [4]}), &["mlp_only_layers", "below 4"]),
        (json!({"decoder_sparse_step": 0}), &["decoder_sparse_step"]),
        (json!({"attention_bias": 1}), &["attention_bias", "true or false"]),
        (json!({"architectures": "Qwen3MoeForCausalLM"}), &["architectures"]),
    ] {
        refused(&with(changes), words);
    }
    for key in [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "moe_intermediate_size",
        "num_experts",
    ] {
        refused(&without(key), &[key, "missing"]);
    }
    for text in ["", "[]", "{", "null", "\"x\"", "{\"a\":1}"] {
        assert!(ModelConfig::from_json(text, &ConfigOptions::default()).is_err());
    }
}

#[test]
fn an_unknown_key_can_be_declared_harmless() {
    let config = with(json!({"my_note": "hello"}));
    refused(&config, &["my_note", "--ignore-key"]);
    let options = ConfigOptions { ignored_keys: vec!["my_note".into()] };
    assert_eq!(ModelConfig::from_json(&config.to_string(), &options).unwrap(), parse(&base()).unwrap());
}

#[test]
fn layers_are_sparse_where_the_reference_has_them_sparse() {
    let kinds = |changes| {
        let config = parse(&with(changes)).unwrap();
        config.layers.iter().map(|kind| matches!(kind, FeedForward::Sparse { .. })).collect::<Vec<_>>()
    };
    assert_eq!(kinds(json!({})), [true; 4]);
    assert_eq!(kinds(json!({"decoder_sparse_step": 2})), [false, true, false, true]);
    assert_eq!(kinds(json!({"mlp_only_layers": [1, 3]})), [true, false, true, false]);
    assert_eq!(kinds(json!({"mlp_only_layers": null})), [true; 4]);
    assert_eq!(kinds(json!({"num_experts": 0})), [false; 4]);
}

#[test]
fn a_window_counts_only_where_it_is_used() {
    let window = |changes| parse(&with(changes)).unwrap().attention.window;
    assert_eq!(window(json!({"sliding_window": 16})), None);
    assert_eq!(window(json!({"sliding_window": 16, "use_sliding_window": true})), Some(16));
    assert_eq!(window(json!({"sliding_window": null, "use_sliding_window": true})), None);
    assert_eq!(window(json!({"use_sliding_window": true})), Some(4096));
}

/// The tensors that [`base`] asks for.
fn tensors(config: &ModelConfig) -> BTreeMap<String, SourceTensor> {
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, shape: &[u64]| {
        tensors.insert(name, SourceTensor { dtype: "BF16".into(), shape: shape.to_vec() });
    };
    add("model.embed_tokens.weight".into(), &[320, 64]);
    add("lm_head.weight".into(), &[320, 64]);
    add("model.norm.weight".into(), &[64]);
    for (layer, kind) in config.layers.iter().enumerate() {
        let layer = format!("model.layers.{layer}");
        for (name, rows, columns) in [("q", 128, 64), ("k", 64, 64), ("v", 64, 64), ("o", 64, 128)] {
            add(format!("{layer}.self_attn.{name}_proj.weight"), &[rows, columns]);
        }
        for (name, length) in [
            ("input_layernorm", 64),
            ("post_attention_layernorm", 64),
            ("self_attn.q_norm", 32),
            ("self_attn.k_norm", 32),
        ] {
            add(format!("{layer}.{name}.weight"), &[length]);
        }
        let mut block = |prefix: String, intermediate: u64| {
            add(format!("{prefix}.gate_proj.weight"), &[intermediate, 64]);
            add(format!("{prefix}.up_proj.weight"), &[intermediate, 64]);
            add(format!("{prefix}.down_proj.weight"), &[64, intermediate]);
        };
        match kind {
            FeedForward::Dense { .. } => block(format!("{layer}.mlp"), 96),
            FeedForward::Sparse { .. } => {
                (0..8).for_each(|expert| block(format!("{layer}.mlp.experts.{expert}"), 32));
                add(format!("{layer}.mlp.gate.weight"), &[8, 64]);
            }
        }
    }
    tensors
}

fn plan_error(config: &Value, change: impl FnOnce(&mut BTreeMap<String, SourceTensor>)) -> String {
    let config = parse(config).unwrap();
    let mut tensors = tensors(&config);
    change(&mut tensors);
    plan_tensors(&config, &tensors).expect_err("is refused").to_string()
}

#[test]
fn every_tensor_has_its_place() {
    let config = parse(&with(json!({"mlp_only_layers": [2]}))).unwrap();
    let tensors = tensors(&config);
    let plan = plan_tensors(&config, &tensors).unwrap();
    assert!(plan.ignored.is_empty());
    let layers: Vec<_> = plan.expert_layers.iter().map(|layer| layer.layer).collect();
    assert_eq!(layers, [0, 1, 3]);
    let experts: usize = plan.expert_layers.iter().map(|layer| 3 * layer.experts).sum();
    assert_eq!(plan.resident.len() + experts, tensors.len());
}

#[test]
fn fused_experts_are_found_by_their_rows() {
    let config = parse(&base()).unwrap();
    let mut tensors = tensors(&config);
    tensors.retain(|name, _| !name.contains(".experts."));
    for layer in 0..4 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let bf16 = |shape: &[u64]| SourceTensor { dtype: "BF16".into(), shape: shape.to_vec() };
        tensors.insert(format!("{prefix}.gate_up_proj"), bf16(&[8, 64, 64]));
        tensors.insert(format!("{prefix}.down_proj"), bf16(&[8, 64, 32]));
    }
    let plan = plan_tensors(&config, &tensors).unwrap();
    let [gate, up, down] = plan.expert_layers[1].parts(3);
    assert_eq!((gate.first_row, gate.rows, gate.columns), (3 * 64, 32, 64));
    assert_eq!((up.first_row, up.rows, up.columns), (3 * 64 + 32, 32, 64));
    assert_eq!((down.first_row, down.rows, down.columns), (3 * 64, 64, 32));
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let remove = |name: &'static str| move |tensors: &mut BTreeMap<_, _>| drop(tensors.remove(name));
    let missing = "model.layers.2.mlp.experts.7.up_proj.weight";
    assert!(plan_error(&base(), remove(missing)).contains(missing));
    let shape = |tensors: &mut BTreeMap<String, SourceTensor>| {
        tensors.get_mut("model.layers.0.mlp.gate.weight").unwrap().shape = vec![64, 8];
    };
    let error = plan_error(&base(), shape);
    assert!(
        error.contains("mlp.gate.weight") && error.contains("[64, 8]") && error.contains("[8, 64]"),
        "{error}"
    );
    let dtype = |tensors: &mut BTreeMap<String, SourceTensor>| {
        tensors.get_mut("model.norm.weight").unwrap().dtype = "I8".into();
    };
    assert!(plan_error(&base(), dtype).contains("I8"));
}

#[test]
fn leftover_tensors_are_errors() {
    for (name, hint) in [
        ("model.layers.0.self_attn.q_proj.bias", "attention_bias is false"),
        ("model.layers.1.mlp.shared_expert_gate.weight", "shared expert"),
        ("model.layers.4.input_layernorm.weight", "config.json"),
    ] {
        let add = |tensors: &mut BTreeMap<String, SourceTensor>| {
            tensors.insert(name.into(), SourceTensor { dtype: "BF16".into(), shape: vec![1] });
        };
        let error = plan_error(&base(), add);
        assert!(error.contains(name) && error.contains(hint), "{error}");
    }
    let config = parse(&base()).unwrap();
    let mut tensors = tensors(&config);
    let buffer = "model.layers.0.self_attn.rotary_emb.inv_freq";
    tensors.insert(buffer.into(), SourceTensor { dtype: "F32".into(), shape: vec![16] });
    assert_eq!(plan_tensors(&config, &tensors).unwrap().ignored[0].0, buffer);
}

#[test]
fn the_head_is_tied_by_flag_and_by_tensors() {
    let no_head = |tensors: &mut BTreeMap<String, SourceTensor>| drop(tensors.remove("lm_head.weight"));
    assert!(plan_error(&base(), no_head).contains("lm_head.weight"));

    let tied = parse(&with(json!({"tie_word_embeddings": true}))).unwrap();
    let plan = plan_tensors(&tied, &tensors(&tied)).unwrap();
    // A copy is fine if it is one; packing compares the bytes.
    assert_eq!(plan.must_equal.len(), 1);
    assert_eq!(plan.ignored.len(), 1);

    let silent = parse(&without("tie_word_embeddings")).unwrap();
    assert_eq!(silent.head, HeadTying::ByTensors);
    let mut without_head = tensors(&silent);
    assert!(
        plan_tensors(&silent, &without_head)
            .unwrap()
            .resident
            .iter()
            .any(|tensor| tensor.name == "lm_head.weight")
    );
    no_head(&mut without_head);
    assert!(plan_tensors(&silent, &without_head).is_ok());
}
