//! A Hugging Face checkpoint directory: configuration, tokenizer and weights in one file or many.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::FormatError;
use crate::{safetensors, text_file};

/// Longest configuration or template in bytes; real ones have a few thousand.
const CONFIG_LIMIT_BYTES: u64 = 16 << 20;
/// Longest tokenizer in bytes; real ones have up to about 35 million.
const TOKENIZER_LIMIT_BYTES: u64 = 256 << 20;
/// Longest index in bytes; about a hundred for each tensor, of which the largest models have some 100,000.
const INDEX_LIMIT_BYTES: u64 = 256 << 20;
/// Most shards; the largest published checkpoints have about 200.
const SHARDS_LIMIT: usize = 10_000;

/// A tensor of a checkpoint and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointTensor {
    /// Element type by its safetensors name.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Length in bytes.
    pub bytes: u64,
    shard: usize,
    offset: u64,
}

struct Shard {
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// An opened checkpoint: texts in memory, all shards' headers checked, weights still on disk.
pub struct Checkpoint {
    path: PathBuf,
    /// `config.json`.
    pub config: String,
    /// `generation_config.json`.
    pub generation_config: Option<String>,
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<String>,
    /// `chat_template.jinja`.
    pub chat_template: Option<String>,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, CheckpointTensor>,
}

impl Checkpoint {
    /// Opens a directory. Every shard's length is checked against its header, so that a missing byte is found now.
    ///
    /// # Errors
    /// [`FormatError`] names the file, what was expected and what was found.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let metadata = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if !metadata.is_dir() {
            let advice = "give the directory that holds config.json, tokenizer.json and *.safetensors";
            return Err(FormatError::invalid(path, "this path", advice, "a file"));
        }
        let required = |name: &str, what, limit, advice: &str| {
            let file = path.join(name);
            text_file::read_if_there(&file, limit)?.ok_or_else(|| FormatError::Missing {
                path: file,
                what,
                advice: advice.to_owned(),
            })
        };
        let optional = |name: &str| text_file::read_if_there(&path.join(name), CONFIG_LIMIT_BYTES);
        let config = required(
            "config.json",
            "the configuration",
            CONFIG_LIMIT_BYTES,
            "is this a checkpoint directory?",
        )?;
        let tokenizer = required(
            "tokenizer.json",
            "the tokenizer",
            TOKENIZER_LIMIT_BYTES,
            "download it from the model's page, or save the tokenizer with a current version of transformers",
        )?;
        let (shards, tensors) = open_shards(path)?;
        Ok(Self {
            path: path.to_owned(),
            config,
            generation_config: optional("generation_config.json")?,
            tokenizer,
            tokenizer_config: optional("tokenizer_config.json")?,
            chat_template: optional("chat_template.jinja")?,
            shards,
            tensors,
        })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, CheckpointTensor> {
        &self.tensors
    }

    /// Paths and lengths of the shards, in the order of their names.
    pub fn shards(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.shards.iter().map(|shard| (shard.path.as_path(), shard.bytes))
    }

    /// The file that holds a tensor, for messages.
    #[must_use]
    pub fn shard_of(&self, name: &str) -> &Path {
        self.tensors.get(name).map_or(&self.path, |tensor| &self.shards[tensor.shard].path)
    }

    /// Fills `buf` with a tensor's bytes from `start` on.
    ///
    /// # Errors
    /// There is no such tensor, the range is not within it, or the read failed.
    pub fn read(&self, name: &str, start: u64, buf: &mut [u8]) -> Result<(), FormatError> {
        let tensor = self
            .tensors
            .get(name)
            .ok_or_else(|| FormatError::UnknownTensor { path: self.path.clone(), name: name.to_owned() })?;
        let shard = &self.shards[tensor.shard];
        let end = start.checked_add(buf.len() as u64).filter(|&end| end <= tensor.bytes);
        if end.is_none() {
            let what = format!("a range of tensor {name}");
            let found = format!("{} bytes from {start} on", buf.len());
            return Err(FormatError::invalid(
                &shard.path,
                what,
                format!("within {} bytes", tensor.bytes),
                found,
            ));
        }
        shard.file.read_exact_at(buf, tensor.offset + start).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => FormatError::Truncated {
                path: shard.path.clone(),
                what: format!("tensor {name}"),
                expected: tensor.offset + tensor.bytes,
                found: shard.file.metadata().map_or(0, |metadata| metadata.len()),
            },
            _ => FormatError::Io { path: shard.path.clone(), source },
        })
    }
}

/// Opens the shards that the index names, or all of the directory, and joins their headers.
fn open_shards(path: &Path) -> Result<(Vec<Shard>, BTreeMap<String, CheckpointTensor>), FormatError> {
    let index_path = path.join("model.safetensors.index.json");
    let index = text_file::read_if_there(&index_path, INDEX_LIMIT_BYTES)?
        .map(|text| parse_index(&index_path, &text))
        .transpose()?;
    let names = match &index {
        Some(index) => {
            let mut names: Vec<_> = index.values().cloned().collect();
            names.sort();
            names.dedup();
            names
        }
        None => safetensors_in(path)?,
    };
    if names.len() > SHARDS_LIMIT {
        return Err(FormatError::invalid(
            path,
            "the number of shards",
            format!("at most {SHARDS_LIMIT}"),
            names.len(),
        ));
    }
    let mut shards = Vec::with_capacity(names.len());
    let mut tensors: BTreeMap<String, CheckpointTensor> = BTreeMap::new();
    for name in names {
        let shard_path = path.join(&name);
        if index.is_some() && !shard_path.exists() {
            return Err(FormatError::Missing {
                path: shard_path,
                what: "a shard",
                advice: "model.safetensors.index.json names it; download it again".into(),
            });
        }
        let (file, infos, bytes) = open_shard(&shard_path)?;
        let shard = shards.len();
        for (name, info) in infos {
            if let Some(other) = tensors.get(&name) {
                let other: &Shard = &shards[other.shard];
                return Err(FormatError::invalid(
                    &shard_path,
                    format!("tensor {name}"),
                    "in one file only",
                    format!("also in {}", other.path.display()),
                ));
            }
            let safetensors::TensorInfo { dtype, shape, offset, bytes } = info;
            tensors.insert(name, CheckpointTensor { dtype, shape, bytes, shard, offset });
        }
        shards.push(Shard { path: shard_path, file, bytes });
    }
    for (name, shard) in index.iter().flatten() {
        let found = tensors.get(name).map(|tensor| shards[tensor.shard].path.as_path());
        if found != Some(&path.join(shard)) {
            let found = found.map_or("in none of the shards".into(), |path| format!("in {}", path.display()));
            return Err(FormatError::invalid(
                &index_path,
                format!("tensor {name}"),
                format!("in {shard}"),
                found,
            ));
        }
    }
    Ok((shards, tensors))
}

/// Tensor name → file name. A file name is a name, not a path.
fn parse_index(path: &Path, text: &str) -> Result<BTreeMap<String, String>, FormatError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(text)
        .map_err(|error| FormatError::invalid(path, "the index", "an object with a weight_map", error))?;
    for (tensor, file) in &index.weight_map {
        let plain = Path::new(file).file_name().is_some_and(|name| name == file.as_str());
        if !plain || file.contains(['/', '\\', '\0']) {
            let what = format!("the file of tensor {tensor}");
            return Err(FormatError::invalid(
                path,
                what,
                "a file name in the same directory",
                format!("{file:?}"),
            ));
        }
    }
    Ok(index.weight_map)
}

/// Names of all safetensors files, sorted.
fn safetensors_in(path: &Path) -> Result<Vec<String>, FormatError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(FormatError::io(path))? {
        let entry = entry.map_err(FormatError::io(path))?;
        if let Some(name) = entry.file_name().to_str()
            && name.ends_with(".safetensors")
            && !name.starts_with('.')
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    if names.is_empty() {
        return Err(FormatError::Missing {
            path: path.join("model.safetensors"),
            what: "the weights file",
            advice: "no *.safetensors is in this directory".into(),
        });
    }
    Ok(names)
}

fn open_shard(path: &Path) -> Result<(File, BTreeMap<String, safetensors::TensorInfo>, u64), FormatError> {
    let (file, bytes) = text_file::open_regular(path)?;
    let mut prefix = vec![0; safetensors::PREFIX_BYTES.min(bytes) as usize];
    file.read_exact_at(&mut prefix, 0).map_err(FormatError::io(path))?;
    let length = safetensors::header_bytes(path, &prefix, bytes)?;
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, safetensors::PREFIX_BYTES).map_err(FormatError::io(path))?;
    let infos = safetensors::parse_header(path, &header, bytes)?;
    Ok((file, infos, bytes))
}
