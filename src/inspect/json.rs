//! Weights of a whole model as JSON.

use ndarray::{ArrayView3, Axis};
use std::fmt::Write;

use crate::element::Element;
use crate::error::{Result, check_shape};

/// The weights of the layers of a model as JSON for viewers, in the form that BertViz (Vig 2019,
/// <https://arxiv.org/abs/1906.05714>) hands to its head view and model view:
///
/// ```text
/// {"attention": [{"name": null,
///                 "attn": [layer][head][query][key],
///                 "left_text": [query],
///                 "right_text": [key]}],
///  "default_filter": "0",
///  "include_layers": [layer]}
/// ```
///
/// Numbers have the digits that their type needs to be read back as they were; one that is not finite, which JSON does
/// not know, is `null`.
///
/// - `layers`: `[num_heads, q_len, kv_len]` each, one batch entry of [`LayerOutput::weights`]
/// - `queries: [q_len]` and `keys: [kv_len]`, the tokens
///
/// In Python, `head_view([torch.tensor(w)[None] for w in a["attn"]], a["left_text"])` shows what
/// `a = json.load(file)["attention"][0]` has read.
///
/// [`LayerOutput::weights`]: crate::LayerOutput::weights
///
/// ```
/// use multihead::{inspect::bertviz_json, ndarray::array};
/// let layer = array![[[1.0f32, 0.0], [0.25, 0.75]]];
/// let json = bertviz_json(&[layer.view()], &["a", "b"], &["a", "b"])?;
/// assert!(json.contains(r#""attn":[[[[1,0],[0.25,0.75]]]],"left_text":["a","b"]"#));
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Shape`] for layers that do not fit the tokens.
pub fn bertviz_json<T: Element>(
    layers: &[ArrayView3<'_, T>],
    queries: &[impl AsRef<str>],
    keys: &[impl AsRef<str>],
) -> Result<String> {
    let expected = [None, Some(queries.len()), Some(keys.len())];
    for layer in layers {
        check_shape("layers", "[num_heads, q_len, kv_len]", expected, layer.shape())?;
    }
    let mut json = String::from(r#"{"attention":[{"name":null,"attn":"#);
    list(&mut json, layers, |json, heads| {
        list(json, heads.axis_iter(Axis(0)), |json, head| {
            list(json, head.axis_iter(Axis(0)), |json, row| list(json, row, |json, &weight| number(json, weight)));
        });
    });
    json.push_str(r#","left_text":"#);
    list(&mut json, queries, |json, token| string(json, token.as_ref()));
    json.push_str(r#","right_text":"#);
    list(&mut json, keys, |json, token| string(json, token.as_ref()));
    json.push_str(r#"}],"default_filter":"0","include_layers":"#);
    list(&mut json, 0..layers.len(), push);
    json.push('}');
    Ok(json)
}

fn list<I: IntoIterator>(json: &mut String, items: I, mut write: impl FnMut(&mut String, I::Item)) {
    json.push('[');
    for (n, item) in items.into_iter().enumerate() {
        if n > 0 {
            json.push(',');
        }
        write(json, item);
    }
    json.push(']');
}

fn number<T: Element>(json: &mut String, x: T) {
    if x.is_finite() { push(json, x) } else { json.push_str("null") }
}

fn string(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            // A page that carries the JSON in a script must not end there.
            '\0'..' ' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => push(json, format_args!("\\u{:04x}", c as u32)),
            _ => json.push(c),
        }
    }
    json.push('"');
}

fn push(json: &mut String, x: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = write!(json, "{x}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use serde_json::{Value, json};

    #[test]
    fn any_token_and_number_is_read_back() {
        let layer = array![[[0.1f32, f32::NAN, f32::MIN_POSITIVE]], [[1e-30, 1.0, 0.0]]];
        let (queries, keys) = (["\"\\\n\u{1}</script>"], ["é", "", "\u{2028}"]);
        let text = bertviz_json(&[layer.view(), layer.view()], &queries, &keys).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let attention = &value["attention"][0];
        assert_eq!(attention["left_text"], json!(queries));
        assert_eq!(attention["right_text"], json!(keys));
        assert_eq!(value["include_layers"], json!([0, 1]));
        let read = |index: [usize; 3]| attention["attn"][1][index[0]][index[1]][index[2]].as_f64().map(|x| x as f32);
        for (index, &want) in layer.indexed_iter() {
            assert_eq!(read(index.into()), want.is_finite().then_some(want), "{index:?}");
        }
        assert!(!text.contains("</script>"));
    }

    #[test]
    fn nothing_is_a_list_of_nothing() {
        let text = bertviz_json::<f32>(&[], &[""; 0], &[""; 0]).unwrap();
        assert!(serde_json::from_str::<Value>(&text).is_ok_and(|value| value["attention"][0]["attn"] == json!([])));
    }

    #[test]
    fn layers_have_the_lengths_of_the_tokens() {
        let layer = array![[[1.0f32, 0.0]]];
        let error = bertviz_json(&[layer.view()], &["a", "b"], &["a", "b"]).unwrap_err();
        assert_eq!(error.to_string(), "layers: expected [num_heads, q_len, kv_len] = [_, 2, 2], got [1, 1, 2]");
    }
}
