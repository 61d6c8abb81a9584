//! The heads of all layers of a sentence encoder, by what they look at in one sentence.

use multihead::block::Call;
use multihead::inspect::{HeadStatistics, Tokens};
use multihead::ndarray::Array2;
use multihead::{Inputs, Options};
use std::path::Path;

use crate::bert::Bert;
use crate::checkpoint::{Checkpoint, Fault};
use crate::wordpiece::WordPiece;

/// How many heads are named for each thing that they can do.
const NAMED: usize = 3;

/// What is looked for: from which word to which, or from every token to the one before.
const PATTERNS: [(&str, Option<[&str; 2]>); 3] = [
    ("previous token", None),
    ("pronoun: it -> cat", Some(["it", "cat"])),
    ("object: ate -> fish", Some(["ate", "fish"])),
];

/// Says which heads do it most. `words` are the tokens of the sentence.
pub(crate) fn name_heads(folder: &Path, sentence: &str, words: &[String]) -> Result<(), Fault> {
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let (config, bytes) = (String::from_utf8(read("config.json")?)?, read("model.safetensors")?);
    let file = Checkpoint::new(&bytes, Some(&config))?;
    let bert = Bert::load(&file)?;
    let wordpiece = WordPiece::new(&String::from_utf8(read("tokenizer.json")?)?, words.len())?;
    let ids = wordpiece.encode(sentence);
    if ids.len() != words.len() {
        return Err(format!("expected the {} tokens of {words:?}, got {}", words.len(), ids.len()).into());
    }
    let ids = Array2::from_shape_vec((1, ids.len()), ids)?;
    let mut x = bert.embed(&ids, &Array2::from_shape_fn(ids.dim(), |(_, i)| i))?;

    let place = |word: &str| words.iter().position(|other| other == word).ok_or("the sentence has other words");
    let mut found = vec![Vec::new(); PATTERNS.len()];
    for (layer, block) in bert.encoder.blocks().iter().enumerate() {
        let attended = block.attention().attend(&Inputs::new(&x), &Options::new().weights())?;
        let weights = attended.weights.ok_or("weights were asked for")?;
        let statistics = HeadStatistics::of_weights(&weights, &Tokens::new())?;
        for ((_, words), found) in PATTERNS.iter().zip(&mut found) {
            for head in 0..weights.dim().1 {
                let weight = match words {
                    None => statistics.previous[[0, head]],
                    Some([from, to]) => f64::from(weights[[0, head, place(from)?, place(to)?]]),
                };
                found.push((weight, layer, head));
            }
        }
        x = block.forward(&x, &Call::new())?;
    }
    println!("Of all {} heads of {} layers:\n", found[0].len(), bert.encoder.blocks().len());
    for ((name, _), mut found) in PATTERNS.iter().zip(found) {
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        print!("{name:<24}");
        found
            .iter()
            .take(NAMED)
            .for_each(|(weight, layer, head)| print!("{weight:.2} by layer {layer} head {head:<6}"));
        println!();
    }
    println!("\nThe last of these layers, head by head:\n");
    Ok(())
}
