//! From text to tokens as BERT does it: words and signs, and of each word the longest pieces that the vocabulary has.
//!
//! ```text
//! "Café-au-lait!"  ->  cafe - au - lait !  ->  [CLS] cafe - au - lai ##t ! [SEP]
//! ```
//!
//! (Schuster and Nakajima 2012; Devlin et al. 2018.) The rules are read from `tokenizer.json`; a file with other rules than
//! these is refused.

use serde_json::Value;
use std::collections::HashMap;
use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

use crate::checkpoint::Fault;

pub(crate) struct WordPiece {
    vocabulary: HashMap<String, usize>,
    /// Tokens that stand for themselves in a text, with their numbers.
    special: Vec<(String, usize)>,
    unknown: usize,
    /// What stands before a piece that does not begin its word.
    prefix: String,
    /// A word of more characters is unknown.
    longest_word: usize,
    lowercase: bool,
    strip_accents: bool,
    /// What stands at the beginning and at the end.
    ends: [usize; 2],
    /// Tokens of a text, the ends among them; the rest is cut off.
    max_length: usize,
}

impl WordPiece {
    /// From the text of a `tokenizer.json`; `positions` is how many tokens the model can tell apart.
    pub(crate) fn new(json: &str, positions: usize) -> Result<Self, Fault> {
        let file: Value = serde_json::from_str(json)?;
        for (place, expected) in [
            ("/model/type", "WordPiece"),
            ("/normalizer/type", "BertNormalizer"),
            ("/pre_tokenizer/type", "BertPreTokenizer"),
        ] {
            let got = file.pointer(place).and_then(Value::as_str);
            if got != Some(expected) {
                return Err(format!("tokenizer {place}: expected {expected}, got {got:?}").into());
            }
        }
        let number = |value: &Value| value.as_u64().and_then(|id| usize::try_from(id).ok());
        let words = file.pointer("/model/vocab").and_then(Value::as_object).ok_or("expected a vocabulary")?;
        let vocabulary: HashMap<_, _> =
            words.iter().filter_map(|(word, id)| Some((word.clone(), number(id)?))).collect();
        let special = file.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
        let special: Vec<_> =
            special.filter_map(|token| Some((token["content"].as_str()?.to_owned(), number(&token["id"])?))).collect();
        let token = |name: &str| {
            let known = special.iter().find(|(word, _)| word == name).map(|&(_, id)| id);
            known.or(vocabulary.get(name).copied()).ok_or(format!("tokenizer: expected a token {name}"))
        };
        let text =
            |place: &str, default: &str| file.pointer(place).and_then(Value::as_str).unwrap_or(default).to_owned();
        let flag = |name: &str| file["normalizer"][name].as_bool();
        let lowercase = flag("lowercase").unwrap_or(true);
        Ok(Self {
            unknown: token(&text("/model/unk_token", "[UNK]"))?,
            ends: [token("[CLS]")?, token("[SEP]")?],
            prefix: text("/model/continuing_subword_prefix", "##"),
            longest_word: file.pointer("/model/max_input_chars_per_word").and_then(number).unwrap_or(100),
            lowercase,
            strip_accents: flag("strip_accents").unwrap_or(lowercase),
            max_length: file.pointer("/truncation/max_length").and_then(number).unwrap_or(positions).min(positions),
            special,
            vocabulary,
        })
    }

    /// The tokens of a text, at most as many as the model takes.
    pub(crate) fn encode(&self, text: &str) -> Vec<usize> {
        let mut ids = vec![self.ends[0]];
        let mut rest = text;
        while let Some((start, (word, id))) = self.next_special(rest) {
            self.encode_plain(&rest[..start], &mut ids);
            ids.push(*id);
            rest = &rest[start + word.len()..];
        }
        self.encode_plain(rest, &mut ids);
        ids.truncate(self.max_length.max(2) - 1);
        ids.push(self.ends[1]);
        ids
    }

    /// The first token in a text that stands for itself, and where.
    fn next_special(&self, text: &str) -> Option<(usize, &(String, usize))> {
        let found = self.special.iter().filter_map(|token| Some((text.find(&token.0)?, token)));
        found.min_by_key(|&(start, (word, _))| (start, usize::MAX - word.len()))
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<usize>) {
        let mut word = String::new();
        for c in self.normalise(text).chars() {
            let is_sign = is_punctuation(c) || is_ideograph(c);
            if c.is_whitespace() || is_sign {
                self.push_pieces(&word, ids);
                word.clear();
            }
            if is_sign {
                self.push_pieces(c.encode_utf8(&mut [0; 4]), ids);
            } else if !c.is_whitespace() {
                word.push(c);
            }
        }
        self.push_pieces(&word, ids);
    }

    /// Without control characters, and without accents and capitals if the file says so.
    fn normalise(&self, text: &str) -> String {
        let space = |c: char| if c.is_whitespace() { ' ' } else { c };
        let mut text: String = text.chars().filter(|&c| !is_control(c)).map(space).collect();
        if self.strip_accents {
            text = text.nfd().filter(|c| c.general_category() != GeneralCategory::NonspacingMark).collect();
        }
        if self.lowercase { text.chars().flat_map(char::to_lowercase).collect() } else { text }
    }

    /// The longest piece first; a word of which something remains is unknown as a whole.
    fn push_pieces(&self, word: &str, ids: &mut Vec<usize>) {
        if word.is_empty() {
            return;
        }
        let before = ids.len();
        let mut start = if word.chars().count() > self.longest_word { None } else { Some(0) };
        while let Some(from) = start.filter(|&from| from < word.len()) {
            let mut ends = word[from..].char_indices().map(|(at, c)| from + at + c.len_utf8()).rev();
            let prefix = if from == 0 { "" } else { &self.prefix };
            let piece = ends.find_map(|end| {
                let id = self.vocabulary.get(&format!("{prefix}{}", &word[from..end]))?;
                Some((end, *id))
            });
            start = piece.map(|(end, id)| {
                ids.push(id);
                end
            });
        }
        if start.is_none() {
            ids.truncate(before);
            ids.push(self.unknown);
        }
    }
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}

/// Characters that are dropped.
fn is_control(c: char) -> bool {
    let is_other = || {
        use GeneralCategory::{Control, Format, PrivateUse, Surrogate};
        matches!(c.general_category(), Control | Format | PrivateUse | Surrogate)
    };
    matches!(c, '\0' | '\u{fffd}') || !matches!(c, '\t' | '\n' | '\r') && is_other()
}

/// Chinese characters, each of which is a word. (Japanese kana and Korean syllables are not among them.)
fn is_ideograph(c: char) -> bool {
    matches!(
        u32::from(c),
        0x4e00..=0x9fff
            | 0x3400..=0x4dbf
            | 0x20000..=0x2a6df
            | 0x2a700..=0x2b73f
            | 0x2b740..=0x2b81f
            | 0x2b920..=0x2ceaf
            | 0xf900..=0xfaff
            | 0x2f800..=0x2fa1f
    )
}
