//! Ratios over message sizes, as a table and as plots.

use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;
use strum::VariantArray;

use super::contender::Contender;
use super::messages::{MessageFigures, Point, Test};
use super::section::Section;
use super::stats::{self, Comparison};
use crate::failure::CliError;
use crate::table::Table;

const SIZE: (u32, u32) = (860, 340);
/// Width of the legend.
const LEGEND: i32 = 120;
/// The axis spans at least these ratios, so that small differences look small.
const AT_LEAST: (f64, f64) = (0.95, 1.05);
/// The axis spans at most these ratios, so that one wide interval does not flatten the others.
const AT_MOST: (f64, f64) = (0.0, 3.0);

/// The report's section on messages.
pub fn messages(measured: &MessageFigures) -> Result<Section, CliError> {
    let mut table = Table::new(&[
        "test",
        ">size",
        ">bare",
        "against",
        ">figure",
        ">ratio",
        ">95 % interval",
        "verdict",
    ]);
    for point in &measured.points {
        rows(point, &mut table);
    }
    let mut notes = vec![
        format!(
            "Medians of all turns of {} rounds. In each a job of every kind lives, and they work in turns; a ratio is of two turns of the same cycle.",
            measured.rounds
        ),
        "95 % interval of the median ratio, by order statistics: of all turns and of the rounds' medians, whichever reaches further. Lines in the pictures: the same.".into(),
        format!("latency: half a round trip. bandwidth: windows of 16 messages. rate: windows of 64. allreduce, alltoall: one call, four ranks. exchange: the messages of an alltoall over plain sockets, in the job of either kind. {}", legend(&measured.contenders)),
    ];
    match measured.rounds {
        1 => notes.push("One round is no comparison: use --rounds.".into()),
        2..stats::LEAST => notes.push(format!(
            "Fewer than {} rounds are less than 95 % sure of what differs from job to job.",
            stats::LEAST
        )),
        _ => {}
    }
    let mut plots = Vec::new();
    for &test in Test::VARIANTS {
        let of_test: Vec<_> = measured.points.iter().filter(|p| p.test == test).collect();
        if of_test.len() > 1 && measured.rounds > 1 {
            plots.push(plot(test, &of_test, &measured.contenders)?);
        }
    }
    Ok(Section {
        title: format!("MPI messages: {}, {}", measured.mpi, measured.line),
        table,
        notes,
        plots,
    })
}

/// Explains the names of the contenders.
fn legend(contenders: &[Contender]) -> String {
    let told = contenders.iter().filter_map(|contender| match contender {
        Contender::Bare | Contender::Slim => None,
        Contender::Component => Some("btl/slim: the native component, without the preload library."),
        Contender::Verbs => Some("btl/slim over verbs: the same with queue pairs of the adapters."),
        Contender::Mptcp => Some("MPTCP: the kernel's, by mptcpize."),
        Contender::Framed => Some(
            "framed: what SLIM avoids, frames and acknowledgements in user space (programs/slim_framed.c).",
        ),
    });
    told.collect::<Vec<_>>().join(" ")
}

fn rows(point: &Point, table: &mut Table) {
    let bare = point.runs.iter().find(|r| r.contender == Contender::Bare);
    for run in &point.runs {
        if run.contender == Contender::Bare {
            continue;
        }
        let compared = run.compared.as_ref();
        let told = |f: &dyn Fn(&Comparison) -> String| compared.map_or("-".into(), f);
        table.row([
            point.test.to_string(),
            size(f64::from(point.bytes)),
            bare.map_or("-".into(), |r| figure(r.median, &point.unit)),
            run.contender.to_string(),
            figure(run.median, &point.unit),
            told(&|c| format!("{:.3}", c.ratio)),
            told(&|c| format!("{:.3}..{:.3}", c.low, c.high)),
            told(&|c| c.verdict.to_string()),
        ]);
    }
}

fn figure(value: f64, unit: &str) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0} {unit}"),
        v => format!("{v:.2} {unit}"),
    }
}

/// A number of bytes in the largest unit that it reaches.
pub fn size(bytes: f64) -> String {
    for (unit, name) in [(f64::from(1 << 20), "MiB"), (f64::from(1 << 10), "KiB")] {
        if bytes >= unit {
            return format!("{} {name}", bytes / unit);
        }
    }
    format!("{bytes} B")
}

/// Plots one test's ratios over message sizes: a line with intervals for each contender.
fn plot(test: Test, points: &[&Point], contenders: &[Contender]) -> Result<String, CliError> {
    let mut svg = String::new();
    draw(&mut svg, test, points, contenders)
        .map_err(|e| CliError::failed(format!("draw {test}: {e}")))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    test: Test,
    points: &[&Point],
    contenders: &[Contender],
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut low, mut high) = AT_LEAST;
    for compared in points
        .iter()
        .flat_map(|p| &p.runs)
        .filter_map(|r| r.compared.as_ref())
    {
        low = low.min(compared.low - 0.01).max(AT_MOST.0);
        high = high.max(compared.high + 0.01).min(AT_MOST.1);
    }
    let sizes = points.iter().map(|p| f64::from(p.bytes));
    let (first, last) = (
        sizes.clone().fold(f64::MAX, f64::min) / 1.5,
        sizes.fold(1.0, f64::max) * 1.5,
    );
    let better = if test.less_is_better() {
        "less is better"
    } else {
        "more is better"
    };

    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(
            format!("{test}, ratio to bare: {better}"),
            ("sans-serif", 18),
        )
        .margin(12)
        .margin_right(LEGEND + 8)
        .x_label_area_size(46)
        .y_label_area_size(58)
        .build_cartesian_2d((first..last).log_scale().base(2.0), low..high)?;
    chart
        .configure_mesh()
        .x_labels(12)
        .x_label_formatter(&|bytes| size(bytes.round()))
        .y_label_formatter(&|ratio| format!("{ratio:.2}"))
        .x_desc("size of a message")
        .y_desc("ratio to bare")
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .light_line_style(WHITE)
        .draw()?;
    let mut legend = Vec::new();
    chart.draw_series(LineSeries::new([(first, 1.0), (last, 1.0)], &BLACK))?;
    for (n, contender) in contenders.iter().enumerate() {
        // Shifted, so that no interval hides another.
        let aside = 1.04f64.powi(n as i32 * 2 - contenders.len() as i32);
        let compared: Vec<(f64, &Comparison)> = points
            .iter()
            .filter_map(|p| {
                let run = p.runs.iter().find(|r| r.contender == *contender)?;
                Some((f64::from(p.bytes) * aside, run.compared.as_ref()?))
            })
            .collect();
        if compared.is_empty() {
            continue;
        }
        let colour = colour(*contender);
        let line = compared
            .iter()
            .map(|(at, c)| (*at, c.ratio.clamp(low, high)));
        chart.draw_series(LineSeries::new(line.clone(), colour.stroke_width(2)))?;
        legend.push((contender.to_string(), colour.stroke_width(2)));
        chart.draw_series(line.map(|at| Circle::new(at, 3, colour.filled())))?;
        chart.draw_series(compared.iter().map(|(at, c)| {
            let range = [
                (*at, c.low.clamp(low, high)),
                (*at, c.high.clamp(low, high)),
            ];
            PathElement::new(range, colour)
        }))?;
    }
    let x = SIZE.0 as i32 - LEGEND;
    for (n, (name, style)) in legend.into_iter().enumerate() {
        let y = 44 + 20 * n as i32;
        root.draw(&PathElement::new([(x, y), (x + 18, y)], style))?;
        root.draw(&Text::new(name, (x + 24, y - 6), ("sans-serif", 13)))?;
    }
    root.present()?;
    Ok(())
}

/// A contender's colour, the same in every plot.
fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::Bare => BLACK,
        Contender::Slim => RGBColor(0, 90, 181),
        Contender::Component => RGBColor(0, 140, 90),
        Contender::Verbs => RGBColor(130, 70, 160),
        Contender::Mptcp => RGBColor(220, 50, 32),
        Contender::Framed => RGBColor(230, 150, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::messages::ContenderRun;

    fn point(bytes: u32, slim: f64) -> Point {
        let (bare, slim) = (vec![vec![1.0; 4]; 3], vec![vec![slim; 4]; 3]);
        let compared = Comparison::new(&bare, &slim, true);
        let run = |contender, rounds: Vec<Vec<f64>>, compared| ContenderRun {
            contender,
            median: rounds[0][0],
            rounds,
            compared,
        };
        Point {
            test: Test::Latency,
            bytes,
            unit: "us".into(),
            runs: vec![
                run(Contender::Bare, bare, None),
                run(Contender::Slim, slim, compared),
            ],
        }
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(size(8.0), "8 B");
        assert_eq!(size(65536.0), "64 KiB");
        assert_eq!(size(4194304.0), "4 MiB");
    }

    #[test]
    fn a_section_has_a_row_for_each_contender_and_a_picture_for_each_test() {
        let measured = MessageFigures {
            mpi: "Open MPI".into(),
            line: "veth".into(),
            rate_kbit: None,
            rounds: 3,
            contenders: vec![Contender::Bare, Contender::Slim],
            points: vec![point(8, 1.2), point(1 << 20, 1.0)],
        };
        let section = messages(&measured).unwrap();
        assert_eq!(section.table.rows().len(), 2);
        assert!(section.table.to_string().contains("20.0 % worse"));
        let [svg] = &section.plots[..] else {
            panic!("{} plots", section.plots.len())
        };
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("latency, ratio to bare") && svg.contains("8 B"));
    }
}
