//! Reports a run: figures on standard output, a table (CSV), and a plot (SVG).

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use plotters::prelude::*;

use crate::Options;
use crate::world::{STEP, Step, World};

/// Reads one column of a step.
type Value = fn(&Step) -> u64;

/// Prints the figures.
pub fn print(world: &World, options: &Options) {
    let total = |value: Value| world.steps.iter().map(value).sum::<u64>();
    let most = |value: Value| most(world, value);
    println!(
        "{} flows over {} endpoints, {} with one of them; hole {} ms, noticed within {} ms",
        options.flows, options.endpoints, options.hot, options.hole, options.notice
    );
    println!(
        "ends resumed {} of {}, given up {}; the last {:.3} s after the network was back",
        world.resumed.len(),
        2 * options.flows,
        world.given_up,
        (world.last.0 as f64 - world.back_at.0 as f64) / 1e6
    );
    for part in [50, 90, 99] {
        let mut so_far = 0;
        let wanted = world.resumed.len() as u64 * part / 100;
        let at = world.steps.iter().position(|step| {
            so_far += step.resumed;
            so_far >= wanted
        });
        let ms = at.unwrap_or(0) as f64 * STEP as f64 / 1000.0 - world.back_at.0 as f64 / 1000.0;
        println!("{part} % within {ms:.0} ms");
    }
    println!(
        "datagrams {} (most in 10 ms {}), messages on connections {}, SYNs {} (most in 10 ms {}), dropped {}",
        total(|s| s.datagrams),
        most(|s| s.datagrams),
        total(|s| s.messages),
        total(|s| s.syns),
        most(|s| s.syns),
        total(|s| s.dropped)
    );
    println!("longest queue of a listener {}", world.longest_backlog);
    let mut kinds: Vec<_> = world.kinds.iter().collect();
    kinds.sort_by_key(|(_, count)| Reverse(**count));
    println!("{kinds:?}");
}

/// Writes the files that the options name.
pub fn write(world: &World, options: &Options) -> Result<(), String> {
    if let Some(file) = &options.table {
        fs::write(file, table(world)).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    if let Some(file) = &options.picture {
        picture(world, file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

fn most(world: &World, value: Value) -> u64 {
    world.steps.iter().map(value).max().unwrap_or(0)
}

fn table(world: &World) -> String {
    let mut out = String::from("ms,ends_resumed,datagrams,messages,syns,syns_dropped\n");
    for (n, step) in world.steps.iter().enumerate() {
        let Step {
            resumed,
            datagrams,
            messages,
            syns,
            dropped,
        } = step;
        let ms = n as u64 * STEP / 1000;
        let _ = writeln!(
            out,
            "{ms},{resumed},{datagrams},{messages},{syns},{dropped}"
        );
    }
    out
}

/// Plots resumed ends and sent messages over time; each curve has its own scale.
fn picture(world: &World, file: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let series: [(&str, RGBColor, Value); 4] = [
        ("ends resumed", RGBColor(27, 127, 59), |s| s.resumed),
        ("datagrams", RGBColor(31, 95, 191), |s| s.datagrams),
        ("SYNs", RGBColor(191, 122, 31), |s| s.syns),
        ("SYNs dropped", RGBColor(192, 40, 45), |s| s.dropped),
    ];
    let seconds = |n: usize| n as f64 * STEP as f64 / 1e6;
    let area = SVGBackend::new(file, (900, 400)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(32)
        .build_cartesian_2d(0.0..seconds(world.steps.len().max(2) - 1), 0.0..1.0)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .disable_y_axis()
        .x_desc("seconds")
        .draw()?;
    for (name, color, value) in series {
        let most = most(world, value);
        let points = world.steps.iter().enumerate();
        let points = points.map(|(n, s)| (seconds(n), value(s) as f64 / most.max(1) as f64));
        chart
            .draw_series(LineSeries::new(points, color))?
            .label(format!("{name}, at most {most} in 10 ms"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    area.present()?;
    Ok(())
}
