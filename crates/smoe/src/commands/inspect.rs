//! `smoe inspect`: what a vault holds.

use anyhow::{Context, Result};
use serde::Serialize;
use smoe_format::{ExpertLayer, Provenance, ResidentEntry, Vault};
use smoe_model::{ConfigOptions, FeedForward, ModelConfig, RopeScaling};
use smoe_pack::FormatUse;

use crate::cli::InspectArgs;
use crate::commands::pack;
use crate::{open, output};

/// What `--json` prints.
#[derive(Serialize)]
struct InspectReport<'a> {
    path: String,
    version: u32,
    total_bytes: u64,
    alignment_bytes: u32,
    header_bytes: u64,
    resident_bytes: u64,
    expert_bytes: u64,
    checksum_bytes: u64,
    model: ModelSummary,
    has_chat_template: bool,
    formats: Vec<FormatUse>,
    expert_layers: &'a [ExpertLayer],
    resident: &'a [ResidentEntry],
    provenance: &'a Provenance,
}

#[derive(Serialize)]
struct ModelSummary {
    family: &'static str,
    layers: usize,
    sparse_layers: usize,
    hidden_size: usize,
    expert_width: Option<usize>,
    experts: usize,
    experts_per_token: usize,
    attention_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocabulary: usize,
    context: usize,
    rope_theta: f64,
    rope_scaling: String,
    parameters: u64,
    active_parameters: u64,
}

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    open::refuse_directories(&args.model)?;
    let vault = Vault::open(&args.model)?;
    let header = vault.header();
    let options = ConfigOptions { ignored_keys: header.provenance.ignored_keys.clone() };
    let config =
        ModelConfig::from_json(&header.config, &options).with_context(|| args.model.display().to_string())?;
    let formats = formats(&vault);
    let model = summary(&vault, &config, &formats);
    let superblock = vault.superblock();
    let report = InspectReport {
        path: args.model.display().to_string(),
        version: smoe_format::vault::VERSION,
        total_bytes: superblock.total_bytes,
        alignment_bytes: superblock.alignment,
        header_bytes: superblock.header.1,
        resident_bytes: superblock.resident.1,
        expert_bytes: superblock.experts.1,
        checksum_bytes: superblock.checksums.1,
        model,
        has_chat_template: has_template(&vault),
        formats,
        expert_layers: &header.expert_layers,
        resident: &header.resident,
        provenance: &header.provenance,
    };
    if args.json {
        return output::json(&report);
    }
    output::line(text(&report, args.tensors).trim_end())?;
    Ok(())
}

fn has_template(vault: &Vault) -> bool {
    let header = vault.header();
    let in_config = header.tokenizer_config.as_deref().is_some_and(|text| {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|config| !config["chat_template"].is_null())
    });
    header.chat_template.is_some() || in_config
}

/// The tables of the header, added up by kind and format.
fn formats(vault: &Vault) -> Vec<FormatUse> {
    let mut all: Vec<FormatUse> = Vec::new();
    let mut add = |class: &'static str, format: &str, tensors: u64, elements: u64, bytes: u64| match all
        .iter_mut()
        .find(|entry| entry.class == class && entry.format == format)
    {
        Some(entry) => {
            entry.tensors += tensors;
            entry.elements += elements;
            entry.bytes += bytes;
        }
        None => all.push(FormatUse { class, format: format.to_owned(), tensors, elements, bytes }),
    };
    for layer in &vault.header().expert_layers {
        let count = u64::from(layer.count);
        for part in &layer.parts {
            add("experts", part.format.name(), count, count * part.rows * part.columns, count * part.bytes);
        }
    }
    for entry in &vault.header().resident {
        add("resident", entry.format.name(), 1, entry.shape.iter().product(), entry.bytes);
    }
    all
}

fn summary(vault: &Vault, config: &ModelConfig, formats: &[FormatUse]) -> ModelSummary {
    let layers = &vault.header().expert_layers;
    let of = |class: &str| {
        formats.iter().filter(|entry| entry.class == class).map(|entry| entry.elements).sum::<u64>()
    };
    let (experts, resident) = (of("experts"), of("resident"));
    let active: u64 = layers
        .iter()
        .flat_map(|layer| &layer.parts)
        .map(|part| part.rows * part.columns * config.router.top_k as u64)
        .sum();
    ModelSummary {
        family: config.family,
        layers: config.layers.len(),
        sparse_layers: config.sparse_layers(),
        hidden_size: config.hidden_size,
        expert_width: config.layers.iter().find_map(|layer| match layer {
            FeedForward::Sparse { intermediate } => Some(*intermediate),
            FeedForward::Dense { .. } => None,
        }),
        experts: config.router.experts,
        experts_per_token: config.router.top_k,
        attention_heads: config.attention.heads,
        kv_heads: config.attention.kv_heads,
        head_dim: config.attention.head_dim,
        vocabulary: config.vocab_size,
        context: config.context_length,
        rope_theta: config.rope.theta,
        rope_scaling: match &config.rope.scaling {
            RopeScaling::None => "none".into(),
            other => format!("{other:?}"),
        },
        parameters: experts + resident,
        active_parameters: active + resident,
    }
}

fn text(report: &InspectReport<'_>, tensors: bool) -> String {
    let model = &report.model;
    let provenance = report.provenance;
    let mut text = format!(
        "{}: {}, vault version {}, packed by {} from {}\n\n",
        report.path,
        output::bytes(report.total_bytes),
        report.version,
        provenance.packed_by,
        provenance.source
    );
    let row = |name: &str, value: String| format!("  {name:<12}{value}\n");
    let width = model.expert_width.map_or(String::new(), |width| format!(" of width {width}"));
    text.push_str(&row(
        "model",
        format!(
            "{}, {} parameters, {} active per token",
            model.family,
            output::count(model.parameters),
            output::count(model.active_parameters)
        ),
    ));
    text.push_str(&row(
        "layers",
        format!(
            "{}, {} of them with experts; hidden size {}",
            model.layers, model.sparse_layers, model.hidden_size
        ),
    ));
    text.push_str(&row(
        "experts",
        format!("{} per layer{width}, {} chosen per token", model.experts, model.experts_per_token),
    ));
    text.push_str(&row(
        "attention",
        format!(
            "{} heads, {} for keys and values, of {}",
            model.attention_heads, model.kv_heads, model.head_dim
        ),
    ));
    text.push_str(&row(
        "context",
        format!("{} tokens; RoPE base {}, scaling {}", model.context, model.rope_theta, model.rope_scaling),
    ));
    text.push_str(&row(
        "vocabulary",
        format!(
            "{}; chat template: {}",
            model.vocabulary,
            if report.has_chat_template { "yes" } else { "no" }
        ),
    ));
    text.push_str(&row(
        "sections",
        format!(
            "header {}, resident {}, experts {}, aligned to {} bytes",
            output::bytes(report.header_bytes),
            output::bytes(report.resident_bytes),
            output::bytes(report.expert_bytes),
            report.alignment_bytes
        ),
    ));
    if let Some(layer) = report.expert_layers.first() {
        let strides = report.expert_layers.iter().map(|layer| layer.stride);
        let (least, most) =
            strides.fold((u64::MAX, 0), |(least, most), stride| (least.min(stride), most.max(stride)));
        let size = match least == most {
            true => output::bytes(layer.stride),
            false => format!("{} to {}", output::bytes(least), output::bytes(most)),
        };
        text.push_str(&row("record", format!("{size}, one read for each expert")));
    }
    text.push('\n');
    text.push_str(&pack::format_table(&report.formats));
    for line in &provenance.fallbacks {
        text.push_str(&format!("  format: {line}\n"));
    }
    for line in &provenance.ignored_tensors {
        text.push_str(&format!("  ignored: {line}\n"));
    }
    for key in &provenance.ignored_keys {
        text.push_str(&format!("  ignored key: {key}\n"));
    }
    if tensors {
        let mut rows = vec![["tensor", "format", "shape", "size"].map(str::to_owned).to_vec()];
        rows.extend(report.resident.iter().map(|entry| {
            vec![
                entry.name.clone(),
                entry.format.name().to_owned(),
                format!("{:?}", entry.shape),
                output::bytes(entry.bytes),
            ]
        }));
        text.push('\n');
        text.push_str(&output::table(&rows));
    }
    text
}
