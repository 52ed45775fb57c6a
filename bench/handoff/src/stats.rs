//! Medians and quartiles.

pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    quartiles(values)[1]
}

/// The lower quartile, the median and the upper quartile, each interpolated between its two nearest values.
pub fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|share| {
        let place = share * (values.len() - 1) as f64;
        let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
        below + (above - below) * place.fract()
    })
}
