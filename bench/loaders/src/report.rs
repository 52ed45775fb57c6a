//! The output: CSV for `bench/tables.py` and `bench/pictures.py`.

/// A text that may contain commas and quotation marks.
pub fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// The lines of all runs.
pub fn speed(lines: &[String], head: &str) -> String {
    format!(
        "# {head}\n\
         # From the go to the last batch, starts of workers included.\n\
         round,kind,order,cache,trains,subject,samples_per_s,first_ms,cpu_us_per_sample,au,step_us,step_alone_us,\
         error\n{}",
        lines.concat()
    )
}

/// The lines of all subjects and kinds.
pub fn same(lines: &[String], head: &str) -> String {
    format!("# {head}\nkind,subject,order_right,content_right,repeated,error\n{}", lines.concat())
}
