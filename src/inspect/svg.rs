//! Weights as a picture: one heat map for each head, tokens on the outer axes, one colour scale for all.

use ndarray::{ArrayRef3, ArrayView2, ArrayView3, Axis};
use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use crate::element::Element;
use crate::error::{Error, Result, check_shape};

/// Width and height of a pair, in pixels.
const CELL: usize = 16;
const INK: &str = "#282834";
/// From paper over orange and red to night, for 0 to 1; darker is more, also in grey.
const COLOURS: [[f64; 3]; 5] =
    [[247.0, 244.0, 236.0], [253.0, 205.0, 130.0], [240.0, 110.0, 80.0], [168.0, 32.0, 92.0], [44.0, 8.0, 64.0]];
/// A share of the largest weight that nobody could tell from 0.
const INVISIBLE: f64 = 1.0 / 256.0;

/// A sheet of heat maps, to be written as SVG: rows are queries, columns are keys.
///
/// ```
/// use multihead::{inspect::HeatMaps, ndarray::array};
/// let weights = array![[[1.0f32, 0.0], [0.25, 0.75]]]; // [num_heads, q_len, kv_len]
/// let svg = HeatMaps::new(&weights, &["to", "be"], &["to", "be"])?.title("To be").to_svg();
/// assert!(svg.starts_with("<svg") && svg.contains("head 0"));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a description of a picture draws nothing by itself"]
pub struct HeatMaps<'a, T> {
    /// `[num_heads, q_len, kv_len]`
    weights: ArrayView3<'a, T>,
    queries: Vec<String>,
    keys: Vec<String>,
    title: String,
    subtitle: String,
    /// By head.
    notes: BTreeMap<usize, Note>,
    columns: usize,
}

/// What is said about a head.
#[derive(Debug, Clone)]
struct Note {
    text: String,
    framed: Option<[usize; 2]>,
}

impl<'a, T: Element> HeatMaps<'a, T> {
    /// One map for each head: `weights: [num_heads, q_len, kv_len]`, `queries: [q_len]`, `keys: [kv_len]`.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// let error = HeatMaps::new(&Array3::<f32>::ones((2, 1, 2)), &["a"], &["b"]).unwrap_err();
    /// assert_eq!(error.to_string(), "weights: expected [num_heads, q_len, kv_len] = [_, 1, 1], got [2, 1, 2]");
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if the weights do not fit the tokens.
    pub fn new(weights: &'a ArrayRef3<T>, queries: &[impl AsRef<str>], keys: &[impl AsRef<str>]) -> Result<Self> {
        let expected = [None, Some(queries.len()), Some(keys.len())];
        check_shape("weights", "[num_heads, q_len, kv_len]", expected, weights.shape())?;
        Ok(Self {
            weights: weights.view(),
            queries: queries.iter().map(|token| escaped(token.as_ref())).collect(),
            keys: keys.iter().map(|token| escaped(token.as_ref())).collect(),
            title: String::new(),
            subtitle: String::new(),
            notes: BTreeMap::new(),
            columns: 4,
        })
    }

    /// A line above the maps.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// # let weights = Array3::<f32>::ones((1, 1, 1));
    /// assert!(HeatMaps::new(&weights, &["a"], &["a"])?.title("x < y").to_svg().contains("x &lt; y"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn title(mut self, title: &str) -> Self {
        self.title = escaped(title);
        self
    }

    /// A smaller line below the title.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// # let weights = Array3::<f32>::ones((1, 1, 1));
    /// assert!(HeatMaps::new(&weights, &["a"], &["a"])?.subtitle("layer 5").to_svg().contains("layer 5"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn subtitle(mut self, subtitle: &str) -> Self {
        self.subtitle = escaped(subtitle);
        self
    }

    /// A few words above the map of a head, and a frame around the pair of a query and a key.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// # let weights = Array3::<f32>::ones((2, 1, 1));
    /// let maps = HeatMaps::new(&weights, &["a"], &["b"])?.note(1, "a → b", Some([0, 0]))?;
    /// assert!(maps.to_svg().contains("a → b"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for a head, query or key that is not there.
    pub fn note(mut self, head: usize, text: &str, framed: Option<[usize; 2]>) -> Result<Self> {
        let (num_heads, q_len, kv_len) = self.weights.dim();
        if head >= num_heads {
            return Err(Error::value("head", format!("a head below num_heads = {num_heads}"), head));
        }
        if let Some([i, j]) = framed.filter(|&[i, j]| i >= q_len || j >= kv_len) {
            let expected = format!("a query and a key below [q_len, kv_len] = [{q_len}, {kv_len}]");
            return Err(Error::value("framed", expected, format!("[{i}, {j}]")));
        }
        self.notes.insert(head, Note { text: escaped(text), framed });
        Ok(self)
    }

    /// How many maps stand side by side: 4 unless given, 1 at least.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// # let weights = Array3::<f32>::ones((6, 1, 1));
    /// let maps = HeatMaps::new(&weights, &["a"], &["a"])?.columns(3);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns.max(1);
        self
    }

    /// The picture.
    ///
    /// ```
    /// # use multihead::{inspect::HeatMaps, ndarray::Array3};
    /// # let weights = Array3::<f32>::ones((1, 1, 1));
    /// assert!(HeatMaps::new(&weights, &["a"], &["a"])?.to_svg().ends_with("</svg>\n"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn to_svg(&self) -> String {
        let (num_heads, q_len, kv_len) = self.weights.dim();
        let heads = if self.weights.is_empty() { 0 } else { num_heads };
        let columns = self.columns.min(heads.max(1));
        let [map_width, map_height] = [CELL * kv_len, CELL * q_len];
        let margin = |tokens: &[String]| 12 + 8 * tokens.iter().map(|token| token.chars().count()).max().unwrap_or(0);
        let [left, below] = [margin(&self.queries), margin(&self.keys)];
        let [step_x, step_y] = [map_width + 18, map_height + 38];
        let top = 104;
        let rows = heads.div_ceil(columns);
        // Wide enough for the lines of text, at about half an em a letter.
        let text = (self.title.chars().count() * 13).max(self.subtitle.chars().count() * 8);
        let width = (left + columns * step_x + 70).max(left + text);
        let height = top + rows * step_y + below;

        let mut svg = Svg(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"15\" fill=\"{INK}\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
        ));
        svg.text([left, 34], "font-size=\"26\"", &self.title);
        svg.text([left, 60], "", &self.subtitle);
        let largest = self.weights.iter().map(|w| w.into_f64()).filter(|w| w.is_finite()).fold(0.0, f64::max);
        for (head, weights) in self.weights.axis_iter(Axis(0)).enumerate().take(heads) {
            let [column, row] = [head % columns, head / columns];
            let corner = [left + column * step_x, top + row * step_y];
            svg.map(corner, weights, largest);
            let [x, y] = corner;
            svg.text([x, y - 6], "font-size=\"16\" font-weight=\"bold\"", &format!("head {head}"));
            if let Some(note) = self.notes.get(&head) {
                svg.text([x + map_width, y - 6], "text-anchor=\"end\"", &note.text);
                if let Some([i, j]) = note.framed {
                    let frame = format!("fill=\"none\" stroke=\"{INK}\" stroke-width=\"2\"");
                    svg.rect([x + CELL * j, y + CELL * i], [CELL, CELL], &frame);
                }
            }
            if column == 0 {
                for (i, token) in self.queries.iter().enumerate() {
                    svg.text([x - 6, y + CELL * i + 13], "text-anchor=\"end\"", token);
                }
            }
            // Nothing stands below the last maps of their columns.
            if head + columns >= heads {
                for (j, token) in self.keys.iter().enumerate() {
                    let [x, y] = [x + CELL * j + 13, y + map_height + 6];
                    svg.text([x, y], &format!("text-anchor=\"end\" transform=\"rotate(-90 {x} {y})\""), token);
                }
            }
        }
        svg.scale([left + columns * step_x + 4, top], largest);
        svg.0.push_str("</svg>\n");
        svg.0
    }
}

/// The text of a picture.
struct Svg(String);

impl Svg {
    fn push(&mut self, line: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{line}");
    }

    /// Text that has been escaped.
    fn text(&mut self, [x, y]: [usize; 2], attributes: &str, text: &str) {
        if !text.is_empty() {
            self.push(format_args!("<text x=\"{x}\" y=\"{y}\" {attributes}>{text}</text>"));
        }
    }

    fn rect(&mut self, [x, y]: [usize; 2], [width, height]: [usize; 2], attributes: &str) {
        self.push(format_args!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" {attributes}/>"));
    }

    /// The map of one head: `weights: [q_len, kv_len]`.
    fn map<T: Element>(&mut self, [x, y]: [usize; 2], weights: ArrayView2<'_, T>, largest: f64) {
        let (q_len, kv_len) = weights.dim();
        self.rect([x, y], [CELL * kv_len, CELL * q_len], &fill(0.0));
        for ((i, j), w) in weights.indexed_iter() {
            let w = w.into_f64();
            // What is no number is grey.
            let fill = match w / largest {
                _ if !w.is_finite() => "fill=\"#888\"".to_owned(),
                share if share > INVISIBLE => fill(share),
                _ => continue,
            };
            self.rect([x + CELL * j, y + CELL * i], [CELL, CELL], &fill);
        }
    }

    /// The scale of colours.
    fn scale(&mut self, [x, y]: [usize; 2], largest: f64) {
        const STEPS: usize = 64;
        for step in 0..STEPS {
            self.rect([x, y + 3 * (STEPS - 1 - step)], [14, 3], &fill(step as f64 / (STEPS - 1) as f64));
        }
        for (share, place) in [(1.0, 8), (0.5, 3 * STEPS / 2 + 5), (0.0, 3 * STEPS)] {
            self.text([x + 18, y + place], "font-size=\"14\"", &format!("{:.2}", share * largest));
        }
        self.text([x, y - 6], "font-size=\"14\"", "weight");
    }
}

/// The colour of a share of the largest weight.
fn fill(share: f64) -> String {
    let place = share.clamp(0.0, 1.0) * (COLOURS.len() - 1) as f64;
    let stop = (place as usize).min(COLOURS.len() - 2);
    let mix = |c: usize| COLOURS[stop][c] + (place - stop as f64) * (COLOURS[stop + 1][c] - COLOURS[stop][c]);
    format!("fill=\"#{:02x}{:02x}{:02x}\"", mix(0) as u8, mix(1) as u8, mix(2) as u8)
}

/// Text for XML. Characters that it does not allow are replaced.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            '\0'..' ' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            _ => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array3, array};

    #[test]
    fn each_visible_weight_is_a_square() {
        let weights = array![[[1.0, 0.0], [0.5, 0.001]], [[0.0, 0.0], [f64::NAN, 0.0]]];
        let svg = HeatMaps::new(&weights, &["a", "b"], &["a", "b"]).unwrap().to_svg();
        let squares = svg.matches("width=\"16\" height=\"16\"").count();
        assert_eq!((squares, svg.matches("#888").count()), (3, 1));
        assert!(svg.contains(&fill(1.0)) && svg.contains(&fill(0.5)));
    }

    #[test]
    fn tokens_cannot_end_the_picture() {
        let token = "</text>\u{0}&\n";
        let svg = HeatMaps::new(&Array3::<f32>::ones((1, 1, 1)), &[token], &[token]).unwrap().title(token).to_svg();
        assert_eq!(svg.matches("&lt;/text&gt;\u{fffd}&amp; </text>").count(), 3);
    }

    #[test]
    fn notes_are_about_pairs_that_exist() {
        let weights = Array3::<f32>::ones((2, 3, 4));
        let maps = HeatMaps::new(&weights, &["q"; 3], &["k"; 4]).unwrap();
        let text = |head, framed| maps.clone().note(head, "", framed).unwrap_err().to_string();
        assert_eq!(text(2, None), "head: expected a head below num_heads = 2, got 2");
        assert_eq!(
            text(0, Some([0, 4])),
            "framed: expected a query and a key below [q_len, kv_len] = [3, 4], got [0, 4]"
        );
        assert_eq!(
            text(0, Some([3, 0])),
            "framed: expected a query and a key below [q_len, kv_len] = [3, 4], got [3, 0]"
        );
    }

    #[test]
    fn empty_maps_are_drawn() {
        for shape in [(0, 1, 1), (1 << 40, 0, 1), (1, 1, 0), (0, 0, 0)] {
            let weights = Array3::<f32>::zeros(shape);
            let svg = HeatMaps::new(&weights, &vec!["q"; shape.1], &vec!["k"; shape.2]).unwrap().to_svg();
            assert!(svg.ends_with("</svg>\n"), "{shape:?}");
        }
    }
}
