//! A violation: its sentence, and the call stacks of what it names.

use std::backtrace::Backtrace;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};

/// Frames of a stack that are shown.
const MOST_FRAMES: usize = 12;

pub(super) struct Violation {
    pub(super) sentence: String,
    stacks: Vec<(&'static str, Arc<Backtrace>)>,
    /// To find names takes long: it is done when somebody asks, and once.
    text: OnceLock<String>,
}

impl Violation {
    pub(super) fn new(sentence: String, stacks: Vec<(&'static str, Arc<Backtrace>)>) -> Self {
        Self { sentence, stacks, text: OnceLock::new() }
    }

    /// The sentence, and the stacks below it.
    pub(super) fn text(&self) -> &str {
        self.text.get_or_init(|| {
            let mut text = self.sentence.clone();
            for (what, stack) in &self.stacks {
                let _ = write!(text, "\n  {what} at:");
                for frame in frames(&stack.to_string()) {
                    let _ = write!(text, "\n    {frame}");
                }
            }
            text
        })
    }
}

/// The program's frames, innermost first: without those of the driver below the exported function, nor of the handler,
/// nor of what starts a thread. One line each.
fn frames(stack: &str) -> Vec<String> {
    let mut frames: Vec<String> = Vec::new();
    for line in stack.lines().map(str::trim) {
        // The number of a frame and its function, or the place of the frame before.
        match (line.split_once(": "), frames.last_mut()) {
            (Some((number, function)), _) if number.bytes().all(|digit| digit.is_ascii_digit()) => {
                frames.push(function.to_owned());
            }
            (_, Some(frame)) => {
                frame.push(' ');
                frame.push_str(line);
            }
            _ => {}
        }
    }
    let of_driver = |frame: &String| frame.contains("twinbuf_cuda_sim::driver::");
    let inside = frames.iter().rposition(of_driver).map_or(0, |last| {
        // Between the handler and the access is the frame that the kernel returns through.
        last + 1 + usize::from(frames[last].contains("on_fault"))
    });
    let starts =
        |frame: &String| frame.contains("__rust_begin_short_backtrace") || frame.contains("__libc_start");
    let shown = frames.into_iter().skip(inside).take_while(|frame| !starts(frame));
    shown.take(MOST_FRAMES).collect()
}
