//! Numbers and times as people write them.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Why a value is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// It is malformed or out of range.
    Value,
    /// It gives no job key, for this reason.
    Key(&'static str),
}

pub(super) fn number(value: &str, range: RangeInclusive<u32>) -> Result<u32, Bad> {
    let n = value.trim().parse().map_err(|_| Bad::Value)?;
    if range.contains(&n) {
        Ok(n)
    } else {
        Err(Bad::Value)
    }
}

/// Seconds, with or without a decimal point.
pub(super) fn duration(value: &str, range: RangeInclusive<f64>) -> Result<Duration, Bad> {
    let value = value.trim();
    // `f64` would also take "inf", "NaN", "1e3" and "+3", which are mistakes here.
    if !value.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(Bad::Value);
    }
    let seconds = value.parse().map_err(|_| Bad::Value)?;
    if !range.contains(&seconds) {
        return Err(Bad::Value);
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| Bad::Value)
}

pub(super) fn durations(
    value: &str,
    range: RangeInclusive<f64>,
    most: usize,
) -> Result<Vec<Duration>, Bad> {
    let list = value
        .split(',')
        .map(|part| duration(part, range.clone()))
        .collect::<Result<Vec<_>, _>>()?;
    if list.len() <= most {
        Ok(list)
    } else {
        Err(Bad::Value)
    }
}

/// Addresses with a port that can be sent to.
pub(super) fn addresses(value: &str, most: usize) -> Result<Vec<SocketAddr>, Bad> {
    let one = |part: &str| part.trim().parse::<SocketAddr>().map_err(|_| Bad::Value);
    let list = value.split(',').map(one).collect::<Result<Vec<_>, _>>()?;
    let usable = |at: &SocketAddr| at.port() != 0 && !at.ip().is_unspecified();
    if list.len() <= most && list.iter().all(usable) {
        Ok(list)
    } else {
        Err(Bad::Value)
    }
}
