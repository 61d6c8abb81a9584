//! What the training looked like and what the heads do: as text, and as SVG.

use std::path::Path;

use multihead::inspect::HeatMaps;
use multihead::ndarray::{Array4, Axis, concatenate};
use plotters::prelude::*;

use super::model::Outcome;

/// The loss as an area of bars, one column for several steps.
pub(crate) fn print_curve(curve: &[(f32, f32)]) {
    const HEIGHT: usize = 10;
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let per_column = curve.len().div_ceil(72).max(1);
    let columns: Vec<f32> =
        curve.chunks(per_column).map(|c| c.iter().map(|c| c.0).sum::<f32>() / c.len() as f32).collect();
    let top = columns.iter().fold(f32::MIN_POSITIVE, |m, &x| m.max(x));
    for row in (0..HEIGHT).rev() {
        let bar = |loss: f32| {
            let eighths = (loss / top * (8 * HEIGHT) as f32).round() as usize;
            BARS[eighths.saturating_sub(8 * row).min(8)]
        };
        let line: String = columns.iter().map(|&loss| bar(loss)).collect();
        println!("{:6.2} |{}", top * (row + 1) as f32 / HEIGHT as f32, line.trim_end());
    }
    println!("{:6} +{}", "", "-".repeat(columns.len()));
    println!("{:8}step 1{:>width$}", "", curve.len(), width = columns.len().saturating_sub(6));
}

/// What a head does, as means of its weights over the queries of sequences that the model has not seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    /// How much a token looks at the one before it.
    pub(crate) previous: f64,
    /// How much a token of the second copy looks at what came after its first copy.
    pub(crate) induction: f64,
}

impl Head {
    pub(crate) fn role(&self) -> &'static str {
        match self {
            Self { previous, .. } if *previous > 0.4 => "previous token",
            Self { induction, .. } if *induction > 0.4 => "induction",
            _ => "",
        }
    }
}

/// Each head's scores as bars, and what it became.
pub(crate) fn print_heads(heads: &[Head]) {
    println!("How much each head looks at   the token before           what came after the first copy");
    for head in heads {
        let bar = |share: f64| format!("{share:.2} {:22}", "#".repeat((20.0 * share).round() as usize));
        let place = format!("layer {} head {}", head.layer, head.head);
        let line = format!("  {place:28}{}{}{}", bar(head.previous), bar(head.induction), head.role());
        println!("{}", line.trim_end());
    }
}

const INK: RGBColor = RGBColor(40, 40, 52);
const NIGHT: RGBColor = RGBColor(44, 8, 64);
const RED: RGBColor = RGBColor(200, 60, 80);

fn font(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// Loss and accuracy over the steps.
pub(crate) fn draw_curve(curve: &[(f32, f32)], path: &Path) -> Outcome<()> {
    let root = SVGBackend::new(path, (900, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let top = curve.iter().fold(0.1, |m: f32, c| m.max(c.0)) * 1.05;
    let mut chart = ChartBuilder::on(&root)
        .caption("Two layers of attention learn to repeat", font(20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(54)
        .right_y_label_area_size(54)
        .build_cartesian_2d(0..curve.len(), 0f32..top)?
        .set_secondary_coord(0..curve.len(), 0f32..1.05);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.12))
        .x_desc("step")
        .y_desc("loss (nats)")
        .label_style(font(14))
        .draw()?;
    chart.configure_secondary_axes().y_desc("accuracy on the second copy").label_style(font(14)).draw()?;
    let at = |get: fn(&(f32, f32)) -> f32| curve.iter().map(get).enumerate();
    let line = |color: RGBColor| move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2));
    chart.draw_series(LineSeries::new(at(|c| c.0), NIGHT.stroke_width(2)))?.label("loss").legend(line(NIGHT));
    chart.draw_secondary_series(LineSeries::new(at(|c| c.1), RED.stroke_width(2)))?.label("accuracy").legend(line(RED));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .background_style(WHITE)
        .border_style(INK.mix(0.3))
        .label_font(font(14))
        .draw()?;
    root.present()?;
    Ok(())
}

/// One heat map for each head of each layer, of one sequence: rows look at columns.
pub(crate) fn draw_heads(heads: &[Head], weights: &[Array4<f32>], tokens: &[usize], path: &Path) -> Outcome<()> {
    let views: Vec<_> = weights.iter().map(|weights| weights.index_axis(Axis(0), 0)).collect();
    let maps = concatenate(Axis(0), &views)?;
    let names: Vec<String> = tokens.iter().map(usize::to_string).collect();
    let mut sheet = HeatMaps::new(&maps, &names, &names)?
        .title("Two layers of attention have learned to repeat")
        .subtitle("What each token (row) looks at (column), for a block of random tokens, twice.")
        .columns(maps.len_of(Axis(0)) / weights.len().max(1));
    for (index, head) in heads.iter().enumerate() {
        let text = format!("layer {} head {}: {}", head.layer, head.head, head.role());
        sheet = sheet.note(index, text.trim_end_matches([' ', ':']), None)?;
    }
    std::fs::write(path, sheet.to_svg())?;
    Ok(())
}
