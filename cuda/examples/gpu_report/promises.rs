//! What the crate promises, against the figures of a run. One line for each: met, not met or not measured.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

/// Whether a promise is met, and by what figure. `None`: not measured.
type Found = Option<(bool, String)>;

/// The lines of a run's `report.jsonl`, and its logs, by name.
pub(crate) struct Run<'a> {
    pub(crate) lines: &'a [Value],
    pub(crate) log: &'a dyn Fn(&str) -> Option<String>,
}

impl Run<'_> {
    fn of(&self, section: &str) -> impl Iterator<Item = &Value> {
        let of = move |line: &&Value| line["section"] == section && line["error"].is_null();
        self.lines.iter().filter(of)
    }

    /// The worst of a section's figures, against a limit.
    fn worst(&self, section: &str, path: &str, limit: f64, at_least: bool) -> Found {
        let figures = self.of(section).filter_map(|line| line.pointer(path)?.as_f64());
        let worst = figures.reduce(if at_least { f64::min } else { f64::max })?;
        Some((if at_least { worst >= limit } else { worst <= limit }, format!("{worst:.3}")))
    }

    fn unknown(&self, what: &str, figures: &[&str], met: impl Fn(&Value) -> bool) -> Found {
        let line = self.of("unknowns").find(|line| line["what"] == what)?;
        let of = figures.iter().map(|figure| (*figure, &line[*figure]));
        let found: Vec<_> = of.filter(|(_, found)| !found.is_null()).collect();
        let said =
            found.iter().map(|(figure, found)| format!("{figure} {found}")).collect::<Vec<_>>().join(", ");
        (!found.is_empty()).then(|| (met(line), said))
    }

    /// Frees of this kind in a capture, with the thread's mode relaxed. Not measured where the driver lacks the call.
    fn free(&self, kind: &str) -> Found {
        let line = self.of("unknowns").find(|line| line["what"] == "frees_in_a_capture")?;
        let relaxed = line[kind]["relaxed"].as_object()?;
        Some((relaxed.values().all(|code| code == 0), line[kind].to_string()))
    }

    /// The test programs: how many pass.
    fn tests(&self) -> Found {
        let logs = (self.log)("tests")?;
        let results = || logs.lines().filter(|line| line.starts_with("test result"));
        let ok = results().filter(|line| line.starts_with("test result: ok")).count();
        (results().count() > 0)
            .then(|| (ok == results().count(), format!("{ok} of {} programs", results().count())))
    }

    /// A removed edge shows in the data: in how many runs, for the edge where it shows least.
    fn edges(&self) -> Found {
        let logs = (self.log)("tests")?;
        let wrong = logs.lines().filter(|line| line.starts_with("without "));
        let least = wrong.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).min()?;
        Some((least > 0, format!("wrong data in at least {least} runs of each")))
    }

    fn torch(&self) -> Found {
        let median = |line: &Value| Some((line["way"].as_str()?.to_string(), line["wall_median"].as_f64()?));
        let ways: Vec<_> = self.of("torch").filter_map(median).collect();
        let ours = ways.iter().find(|(way, _)| way == "prefetch")?.1;
        let peers = ways.iter().filter(|(way, _)| way != "prefetch");
        let (peer, best) = peers.min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some((ours <= 1.02 * best, format!("{:.3} of the best peer, `{peer}`", ours / best)))
    }

    /// A writer's copies from the device: the file has the rows, and it takes no longer than writing in the loop.
    fn writer(&self) -> Found {
        let wrong = |line: &&Value| line["written"] == "behind" && !line["error"].is_null();
        if let Some(line) = self.lines.iter().find(wrong) {
            return Some((false, line["error"].to_string()));
        }
        let wall = |way| self.of("torch").find(|line| line["written"] == way)?["wall_median"].as_f64();
        let ratio = wall("behind")? / wall("in_turn")?;
        Some((ratio <= 1.0, format!("{ratio:.3} of the time of writing in the loop")))
    }

    fn sanitizer(&self) -> Found {
        let log = (self.log)("sanitizer")?;
        let sum =
            log.lines().rev().find_map(|line| Some(line.split_once("ERROR SUMMARY: ")?.1.to_string()))?;
        Some((sum.starts_with("0 errors"), sum))
    }

    pub(crate) fn promises(&self) -> Vec<(&'static str, Found)> {
        let well = |line: &Value| {
            let modes = line["modes"].as_object()?;
            let well = modes.values().filter(|mode| mode["well"] == true).count();
            Some((well == modes.len(), format!("{well} of {} modes", modes.len())))
        };
        vec![
            (
                "copies through an uploader have 0.98 of the rate of plain page-locked ones",
                self.worst("copies", "/pinned/uploader_over_plain", 0.98, true),
            ),
            (
                "load, copy and train overlap: the wall is 1.02 of the longest stage",
                self.worst("pipelines", "/overlapped_over_longest", 1.02, false),
            ),
            (
                "a busy uploader slows the caller's own calls to 1.05",
                self.worst("neighbour", "/busy_uploader/enqueue_over_alone", 1.05, false),
            ),
            (
                "an idle copy thread uses 0.01 of a processor",
                self.worst("cpu", "/cpu_share_idle", 0.01, false),
            ),
            (
                "a stager is as fast as copies from pageable memory",
                self.worst("stager", "/threads/3/pageable_over_upload", 1.0, true),
            ),
            ("a lease dropped in a capture breaks nothing", self.of("captures").find_map(well)),
            ("the tests pass with this driver", self.tests()),
            ("each of the three edges is needed here", self.edges()),
            (
                "a view on a wrong stream is refused (address 0)",
                self.unknown("address_0", &["call", "wait", "pageable_memory_access"], |line| {
                    line["refused"] == true
                }),
            ),
            ("page-locked memory can be freed in a capture", self.free("free")),
            ("registered memory can be unregistered in a capture", self.free("unregister")),
            (
                "write-combined slots arrive whole",
                self.unknown("write_combined", &["processor", "rounds", "wrong"], |line| line["wrong"] == 0),
            ),
            ("on Windows (WDDM), copies start without a copy thread", None),
            ("twinbuf.prefetch is as fast as the best of its peers in torch", self.torch()),
            ("a twinbuf.Writer writes tensors of the device whole, and as fast as the loop", self.writer()),
            ("compute-sanitizer finds nothing", self.sanitizer()),
        ]
    }
}

/// Reads the folder of a run. Returns the lines, and whether no promise is broken.
pub(crate) fn of_folder(folder: &Path) -> (String, bool) {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let lines: Vec<Value> =
        read("report.jsonl").lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let log = |name: &str| {
        let files =
            std::fs::read_dir(folder).ok()?.filter_map(|file| file.ok()?.file_name().into_string().ok());
        let wanted =
            |file: &String| if name == "tests" { file.starts_with("test-") } else { file.starts_with(name) };
        let mut files: Vec<_> = files.filter(wanted).collect();
        files.sort();
        Some(files.iter().map(|file| read(file)).collect::<Vec<_>>().join("\n"))
    };
    let (mut out, mut well) = (String::new(), true);
    if lines.iter().any(|line| line["device"] == "twinbuf software device") {
        out += "A rehearsal on the software driver: no figure means anything.\n";
    }
    for (promise, found) in (Run { lines: &lines, log: &log }).promises() {
        let (verdict, figure) = match &found {
            None => ("not measured", ""),
            Some((true, figure)) => ("met         ", &figure[..]),
            Some((false, figure)) => ("NOT MET     ", &figure[..]),
        };
        well &= found.as_ref().is_none_or(|(met, _)| *met);
        let _ = writeln!(out, "{verdict}  {promise}{}{figure}", if figure.is_empty() { "" } else { ": " });
    }
    (out, well)
}
