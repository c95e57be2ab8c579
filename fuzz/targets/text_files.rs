//! Configuration, tokenizer, special tokens and template of a checkpoint: texts, separated by zero bytes.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::{Corpus, fuzz_target};
use smoe_model::{ConfigOptions, ModelConfig, SourceTensor, plan_tensors};
use smoe_text::{ChatInput, ChatTemplate, IncrementalDecoder, Message, TextFiles, Tokenizer, encode_chat};

#[global_allocator]
static ALLOCATOR: smoe_text::BudgetAllocator = smoe_text::BudgetAllocator;

const TOKENIZER: &str = include_str!("../../tests/fixtures/plain/tokenizer.json");

fuzz_target!(|data: &[u8]| -> Corpus {
    let mut texts = data.split(|&byte| byte == 0).map(std::str::from_utf8);
    let mut next = || texts.next().and_then(Result::ok).unwrap_or_default();
    let (config, tokenizer, tokenizer_config, generation_config, template) = (next(), next(), next(), next(), next());
    // A template that takes its time is within its rights; the fuzzer has none for it.
    if template.contains("range") || tokenizer_config.contains("range") {
        return Corpus::Reject;
    }
    if let Ok(config) = ModelConfig::from_json(config, &ConfigOptions { ignored_keys: Vec::new() }) {
        let shape = vec![config.vocab_size as u64, config.hidden_size as u64];
        let tensor = SourceTensor { dtype: "BF16".into(), shape };
        let tensors: BTreeMap<_, _> = [("model.embed_tokens.weight".to_owned(), tensor)].into();
        let _ = plan_tensors(&config, &tensors);
    }
    let optional = |text| Some(text).filter(|text: &&str| !text.is_empty());
    let files = TextFiles {
        tokenizer: if tokenizer.is_empty() { TOKENIZER } else { tokenizer },
        tokenizer_config: optional(tokenizer_config),
        generation_config: optional(generation_config),
        config: if config.is_empty() { "{}" } else { config },
        chat_template: optional(template),
    };
    let template = ChatTemplate::from_files(&files);
    if let Ok(tokenizer) = Tokenizer::from_files(&files) {
        let ids = tokenizer.encode("Hello <|im_end|> 🙂").unwrap_or_default();
        let mut decoder = IncrementalDecoder::new(&tokenizer);
        ids.iter().for_each(|&id| drop(decoder.push(id)));
        decoder.finish();
        if let Ok(Some(template)) = template {
            let messages = [Message::new("user", "<|im_start|>")];
            let _ = encode_chat(&tokenizer, &template, &ChatInput::new(&messages));
        }
    }
    Corpus::Keep
});
